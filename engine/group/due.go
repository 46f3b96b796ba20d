package group

import (
	"cmp"
	"time"
)

// when is when something is to be done about the notice of a partition.
func (p *part) when() time.Duration { return min(p.deadline, p.repeatAt) }

// partHeap is a binary heap of the parts with an unconfirmed notice, by the time at which something is to be done about it;
// of equal ones, the older notice first. A part knows its place.
type partHeap []*part

// set puts a part where its time belongs.
func (h *partHeap) set(p *part) {
	if p.place == 0 {
		*h = append(*h, p)
		p.place = len(*h)
	}
	h.fix(p.place - 1)
}

func (h *partHeap) remove(p *part) {
	i, last := p.place-1, len(*h)-1
	h.swap(i, last)
	(*h)[last] = nil
	*h = (*h)[:last]
	p.place = 0
	h.fix(i)
}

func (h partHeap) before(i, j int) bool {
	return cmp.Or(cmp.Compare(h[i].when(), h[j].when()), cmp.Compare(h[i].notice.NoticeID, h[j].notice.NoticeID)) < 0
}

func (h partHeap) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i+1, j+1
}

func (h partHeap) fix(i int) {
	if i >= len(h) {
		return
	}
	for i > 0 && h.before(i, (i-1)/2) {
		h.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for _, kid := range [2]int{2*i + 1, 2*i + 2} {
			if kid < len(h) && h.before(kid, least) {
				least = kid
			}
		}
		if least == i {
			return
		}
		h.swap(i, least)
		i = least
	}
}
