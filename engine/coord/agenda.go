package coord

import "time"

// agenda is a binary heap of things that are due at a time, the earliest first. What does not matter any more stays until
// its time has come.
type agenda[T any] []appointment[T]

type appointment[T any] struct {
	at   time.Duration
	what T
}

func (a *agenda[T]) add(at time.Duration, what T) {
	*a = append(*a, appointment[T]{at, what})
	s := *a
	for i := len(s) - 1; i > 0 && s[i].at < s[(i-1)/2].at; i = (i - 1) / 2 {
		s[i], s[(i-1)/2] = s[(i-1)/2], s[i]
	}
}

// due takes out the first thing if its time has come.
func (a *agenda[T]) due(now time.Duration) (what T, ok bool) {
	s := *a
	if len(s) == 0 || s[0].at > now {
		return what, false
	}
	what = s[0].what
	last := len(s) - 1
	s[0], s[last] = s[last], appointment[T]{}
	s = s[:last]
	*a = s
	for i := 0; ; {
		least := i
		for _, kid := range [2]int{2*i + 1, 2*i + 2} {
			if kid < last && s[kid].at < s[least].at {
				least = kid
			}
		}
		if least == i {
			return what, true
		}
		s[i], s[least] = s[least], s[i]
		i = least
	}
}

// next is when the first thing is due, 0 if there is none.
func (a agenda[T]) next() time.Duration {
	if len(a) == 0 {
		return 0
	}
	return a[0].at
}
