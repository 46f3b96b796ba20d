package metadata

import "slices"

// order is a list in the order in which its elements were added. Elements are taken out in amortised constant time: they
// are marked as gone, and swept out when they are many or the list is asked for.
type order[T interface{ isGone() bool }] struct {
	list []T
	gone int
}

func (o *order[T]) add(x T) { o.list = append(o.list, x) }

// removed tells that an element has been marked as gone.
func (o *order[T]) removed() {
	if o.gone++; o.gone > len(o.list)/2 {
		o.sweep()
	}
}

// all returns the elements that are not gone.
func (o *order[T]) all() []T {
	if o.gone > 0 {
		o.sweep()
	}
	return o.list
}

// last returns the last element, if it is not gone; the zero value if there is none.
func (o *order[T]) last() (x T) {
	if all := o.all(); len(all) > 0 {
		x = all[len(all)-1]
	}
	return x
}

func (o *order[T]) sweep() {
	o.list = slices.DeleteFunc(o.list, T.isGone)
	o.gone = 0
}
