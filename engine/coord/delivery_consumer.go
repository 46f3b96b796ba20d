package coord

import (
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// maxWaitingPulls is how many PULLs of a subscription may be unanswered; one more gets 0x0027.
const maxWaitingPulls = 2

// consumer is the delivery's own state of one subscription; openSub creates it.
type consumer struct {
	sub    *subscription // nil once it is closed
	group  *groupDelivery
	set    *readerSet // those that its member may own
	credit credit
	// readers are the partitions it owns; ready are those of them that may have something to deliver, short those whose next
	// message is larger than the available credit.
	readers []*reader
	ready   readyList
	short   shortHeap
	pulls   [maxWaitingPulls]*pull // the oldest first
	queued  bool                   // in delivery.turn
	paused  bool                   // its connection has enough to send; Writable wakes it
}

// wants tells whether anything may be sent to it now.
func (con *consumer) wants() bool {
	return con.sub != nil && !con.paused && (con.sub.stream || con.pulls[0] != nil)
}

// pull is an unanswered PULL.
type pull struct {
	con     *consumer
	req     uint64
	maxMsgs uint32 // 0: no limit of its own
	// maxBytes, minBytes and bytes count keys and values; maxBytes 0: no limit of its own.
	maxBytes, minBytes, bytes uint64
	msgs                      uint32
	deadline                  time.Duration // when it stops waiting
	latest                    time.Duration // the same for one that has got nothing because a read from disk is under way
	expired                   bool
	hurried                   bool // another request arrived behind it: it is answered with what there is
	at                        int  // its place in delivery.waiting + 1, 0 = not there
}

// credit is what a subscription may still receive (rule 5 of the protocol): it counts down with every MSG and rises only
// by CREDIT. It is never negative and never above the window.
type credit struct {
	windowCount, count uint32
	windowBytes, bytes uint64
	epoch              uint64 // SETs so far
}

// maxCreditBytes bounds the window in bytes.
const maxCreditBytes = 64 << 20

// newCredit is a window that is wholly available.
func newCredit(count uint32, bytes uint64) credit {
	return credit{windowCount: count, count: count, windowBytes: bytes, bytes: bytes}
}

// set defines the window and makes all of it available.
func (k *credit) set(count uint16, bytes uint32) (grantedCount uint16, grantedBytes uint32) {
	k.windowCount, k.windowBytes = uint32(count), min(uint64(bytes), maxCreditBytes)
	k.count, k.bytes = k.windowCount, k.windowBytes
	k.epoch++
	return count, uint32(k.windowBytes)
}

// add returns credit, up to the window, and tells how much of it fitted.
func (k *credit) add(count uint16, bytes uint32) (grantedCount uint16, grantedBytes uint32) {
	n := min(uint32(count), k.windowCount-k.count)
	b := min(uint64(bytes), k.windowBytes-k.bytes)
	k.count += n
	k.bytes += b
	return uint16(n), uint32(b)
}

// take pays for a message of size bytes, which the caller has checked against what is available.
func (k *credit) take(size uint64) {
	k.count--
	k.bytes -= size
}

// result describes the credit after a CREDIT.
func (k *credit) result(grantedCount uint16, grantedBytes uint32) protocol.CreditResult {
	return protocol.CreditResult{
		GrantedCount: grantedCount, GrantedBytes: grantedBytes,
		OutstandingCount: uint16(k.windowCount - k.count), OutstandingBytes: uint32(k.windowBytes - k.bytes),
		CreditEpoch: k.epoch,
	}
}

// deque is a queue whose elements keep a number for as long as they are in it.
type deque[T any] struct {
	ring []T    // its length is a power of two
	head uint64 // number of the first element
	tail uint64 // number of the next one
}

func (q *deque[T]) len() int { return int(q.tail - q.head) }

// at returns element number n, which is head <= n < tail.
func (q *deque[T]) at(n uint64) *T { return &q.ring[n&uint64(len(q.ring)-1)] }

func (q *deque[T]) front() *T { return q.at(q.head) }

func (q *deque[T]) push(v T) {
	if q.tail-q.head == uint64(len(q.ring)) {
		q.grow()
	}
	*q.at(q.tail) = v
	q.tail++
}

func (q *deque[T]) pop() T {
	var zero T
	p := q.at(q.head)
	v := *p
	*p = zero
	q.head++
	return v
}

func (q *deque[T]) grow() {
	ring := make([]T, max(8, 2*len(q.ring)))
	for n := q.head; n != q.tail; n++ {
		ring[n&uint64(len(ring)-1)] = *q.at(n)
	}
	q.ring = ring
}

// pullHeap holds the waiting PULLs, the earliest deadline first.
type pullHeap []*pull

func (h *pullHeap) push(p *pull) {
	*h = append(*h, p)
	p.at = len(*h)
	h.fix(p.at - 1)
}

func (h *pullHeap) remove(p *pull) {
	if p.at == 0 {
		return
	}
	i, n := p.at-1, len(*h)-1
	h.swap(i, n)
	(*h)[n] = nil
	*h = (*h)[:n]
	p.at = 0
	h.fix(i)
}

func (h pullHeap) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i+1, j+1
}

func (h pullHeap) fix(i int) {
	if i >= len(h) {
		return
	}
	for i > 0 && h[i].deadline < h[(i-1)/2].deadline {
		h.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for _, kid := range [2]int{2*i + 1, 2*i + 2} {
			if kid < len(h) && h[kid].deadline < h[least].deadline {
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
