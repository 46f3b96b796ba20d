package ledger

import "time"

// retry is a message that waits for its next attempt.
type retry struct {
	at  time.Duration
	seq Sequence
}

func (r retry) before(o retry) bool { return r.at < o.at || r.at == o.at && r.seq < o.seq }

// retryHeap is a binary heap of retries: the earliest first, of equally early ones the lowest sequence. A message that ends
// in another way leaves its retry behind, see Cursor.firstRetry.
type retryHeap []retry

func (h *retryHeap) push(r retry) {
	*h = append(*h, r)
	s := *h
	i := len(s) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !s[i].before(s[up]) {
			break
		}
		s[i], s[up] = s[up], s[i]
		i = up
	}
}

// pop takes out the first one.
func (h *retryHeap) pop() {
	s := *h
	n := len(s) - 1
	s[0] = s[n]
	*h = s[:n]
	h.sink()
}

// sink restores the order where only the first one may be out of place.
func (h retryHeap) sink() {
	for i := 0; ; {
		least := i
		for _, kid := range [2]int{2*i + 1, 2*i + 2} {
			if kid < len(h) && h[kid].before(h[least]) {
				least = kid
			}
		}
		if least == i {
			return
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
}

// timers is a binary heap of the cursors that wait for a deadline, by Cursor.wake; a cursor knows its place.
type timers []*Cursor

// set moves c to its new wake-up time; never takes it out.
func (t *timers) set(c *Cursor, wake time.Duration) {
	if c.wake == wake {
		return
	}
	c.wake = wake
	switch {
	case wake == never:
		i, n := c.timer-1, len(*t)-1
		(*t)[i] = (*t)[n]
		(*t)[i].timer = i + 1
		(*t)[n] = nil
		*t = (*t)[:n]
		c.timer = 0
		t.fix(i)
	case c.timer == 0:
		*t = append(*t, c)
		c.timer = len(*t)
		t.fix(c.timer - 1)
	default:
		t.fix(c.timer - 1)
	}
}

func (t timers) fix(i int) {
	if i >= len(t) {
		return
	}
	for i > 0 && t[i].wake < t[(i-1)/2].wake {
		t.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for _, kid := range [2]int{2*i + 1, 2*i + 2} {
			if kid < len(t) && t[kid].wake < t[least].wake {
				least = kid
			}
		}
		if least == i {
			return
		}
		t.swap(i, least)
		i = least
	}
}

func (t timers) swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].timer, t[j].timer = i+1, j+1
}
