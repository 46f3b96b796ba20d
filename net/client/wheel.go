package client

import "time"

// wheelSize is the number of buckets of a loop's timer wheel. Timers further away than the wheel reaches are looked at
// early and put back.
const wheelSize = 1024

// wheelEntry is a connection's place in its loop's wheel. Each open connection has exactly one: the wheel is also the
// list of the loop's connections.
type wheelEntry struct {
	prev, next *conn
	at         int64 // tick at which the connection is looked at; 0 = not in the wheel
}

// wheel looks at each connection when the first of its deadlines may have passed. Deadlines that move away, as that of
// the keepalive does with every frame, cost nothing: the connection is looked at in vain once and put back.
type wheel struct {
	tick    time.Duration
	current int64 // last tick that was served
	buckets [wheelSize]*conn
}

// schedule makes sure that c is looked at no later than the first tick after due.
func (w *wheel) schedule(c *conn, due time.Duration) {
	at := min(max(int64(due/w.tick)+1, w.current+1), w.current+wheelSize-1)
	e := &c.wheel
	if e.at != 0 {
		if e.at <= at {
			return
		}
		w.remove(c)
	}
	head := &w.buckets[at%wheelSize]
	e.at, e.prev, e.next = at, nil, *head
	if *head != nil {
		(*head).wheel.prev = c
	}
	*head = c
}

// remove takes c out of the wheel.
func (w *wheel) remove(c *conn) {
	e := &c.wheel
	if e.at == 0 {
		return
	}
	if e.prev != nil {
		e.prev.wheel.next = e.next
	} else {
		w.buckets[e.at%wheelSize] = e.next
	}
	if e.next != nil {
		e.next.wheel.prev = e.prev
	}
	*e = wheelEntry{}
}

// advance calls look for every connection whose tick has come; each is out of the wheel then.
func (w *wheel) advance(now time.Duration, look func(*conn)) {
	for last := int64(now / w.tick); w.current < last; {
		w.current++
		bucket := &w.buckets[w.current%wheelSize]
		for c := *bucket; c != nil; c = *bucket {
			w.remove(c)
			look(c)
		}
	}
}

// each calls f for every connection in the wheel; f may move or remove it.
func (w *wheel) each(f func(*conn)) {
	var all []*conn
	for _, c := range w.buckets {
		for ; c != nil; c = c.wheel.next {
			all = append(all, c)
		}
	}
	for _, c := range all {
		f(c)
	}
}
