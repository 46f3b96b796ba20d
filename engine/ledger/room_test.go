package ledger

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// hall is a book with many cursors that share little room.
type hall struct {
	t       testing.TB
	book    *Book
	room    *Room
	opts    Options
	cursors []*Cursor
	id      DeliveryID
	fx      Effects
}

func newHall(t testing.TB, cursors, most int) *hall {
	h := &hall{t: t, room: NewRoom(most), opts: DefaultOptions()}
	h.book = NewBook(rand.NewPCG(1, 1), h.room)
	h.book.Restore(0, 0, &h.fx)
	for i := range cursors {
		c := h.book.Open(Key{Group: 1, Topic: 1, Partition: uint16(i)}, &h.opts, 0)
		c.Committed(1000)
		c.Own(owner)
		h.cursors = append(h.cursors, c)
	}
	h.commit()
	h.fx.Reset()
	return h
}

func (h *hall) commit() {
	h.t.Helper()
	for h.book.Pending() {
		if err := h.book.Apply(h.book.AppendRecord(nil, 0), 0, &h.fx); err != nil {
			h.t.Fatal(err)
		}
	}
}

// fill delivers from a cursor until it offers nothing, and returns how many messages came.
func (h *hall) fill(c *Cursor) (n int) {
	for {
		seq, _, ok := c.Peek(0)
		if !ok {
			return n
		}
		h.id++
		c.Take(seq, h.id, 0)
		n++
	}
}

// ack acknowledges the first n messages of a cursor.
func (h *hall) ack(c *Cursor, n Sequence) {
	h.t.Helper()
	if v := c.Ack(n, h.id, owner.Epoch, false, true, 0); v != Settling {
		h.t.Fatalf("verdict %d", v)
	}
	h.commit()
}

func TestRoom_FreshMessagesWaitWhenItIsFullAndComeWhenThereIsRoom(t *testing.T) {
	h := newHall(t, 3, 100)
	a, b, c := h.cursors[0], h.cursors[1], h.cursors[2]
	if n := h.fill(a); n != 100 {
		t.Fatalf("%d messages are open, want 100", n)
	}
	// The others are not brought to a standstill.
	if n, m := h.fill(b), h.fill(c); n != openShare || m != openShare {
		t.Fatalf("%d and %d messages came where there is no room, want %d each", n, m, openShare)
	}
	h.ack(b, 10) // whoever makes room in his own share gets it again
	if len(h.fx.Ready) != 1 || h.fx.Ready[0] != b || h.fill(b) != 10 {
		t.Fatalf("ready are %v", h.fx.Ready)
	}
	h.fx.Reset()
	h.ack(a, 50)
	if want := []*Cursor{a, b, c}; !slices.Equal(h.fx.Ready, want) { // in the order in which they came
		t.Fatalf("ready are %v, want %v", h.fx.Ready, want)
	}
	if n := h.fill(c); n != 100-h.room.Open()+n || h.room.Open() != 100 {
		t.Fatalf("%d more messages came, %d are open", n, h.room.Open())
	}
}

func TestRoom_IsGivenBackByMovesAndDeletions(t *testing.T) {
	h := newHall(t, 3, 100)
	h.fill(h.cursors[0])
	h.fill(h.cursors[1])
	h.cursors[0].Seek(500)
	h.commit()
	if h.room.Open() != openShare || !slices.Contains(h.fx.Ready, h.cursors[1]) {
		t.Fatalf("%d messages are open after a move, ready are %v", h.room.Open(), h.fx.Ready)
	}
	h.book.Forget(h.cursors[1])
	h.commit()
	if h.room.Open() != 0 {
		t.Fatalf("%d messages are open after a deletion", h.room.Open())
	}
	h.fill(h.cursors[0])
	h.fill(h.cursors[2])
	h.book.Forget(h.cursors[2]) // while it waits for room
	h.commit()
	h.fx.Reset()
	h.ack(h.cursors[0], 600)
	if slices.Contains(h.fx.Ready, h.cursors[2]) {
		t.Fatal("a cursor that is gone is reported as ready")
	}
}

func TestRoom_WhatRecoveryFindsOpenStays(t *testing.T) {
	h := newHall(t, 1, 100)
	h.fill(h.cursors[0])
	h.commit()
	room := NewRoom(10)
	book := NewBook(rand.NewPCG(1, 1), room)
	if err := book.Load(h.book.AppendSnapshot(nil, 0, 0)); err != nil {
		t.Fatal(err)
	}
	var fx Effects
	book.Restore(0, 0, &fx)
	c := book.Cursor(h.cursors[0].Key())
	c.Committed(1000)
	c.Own(owner)
	h.cursors[0], h.book = c, book
	if n := h.fill(c); n != 100 || room.Open() != 100 {
		t.Fatalf("%d messages are delivered again, %d are open", n, room.Open())
	}
}

// A group of many partitions among many goes, one by one or all together, in time that grows with their number.
func BenchmarkBook_ForgetAllCursors(b *testing.B) {
	for _, cursors := range []int{10_000, 100_000} {
		b.Run(fmt.Sprintf("cursors=%d", cursors), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				h := newHall(b, 0, 1000)
				for i := range cursors {
					h.cursors = append(h.cursors, h.book.Open(Key{Group: uint16(i/100) + 1, Topic: 1, Partition: uint16(i % 100)}, &h.opts, 0))
				}
				h.commit()
				b.StartTimer()
				for _, c := range h.cursors {
					h.book.Forget(c)
				}
				h.commit()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(cursors), "ns/cursor")
		})
	}
}

// Room that was offered to a cursor nobody reads any more goes to the next one.
func TestRoom_WhatIsNotTakenIsOfferedToTheNext(t *testing.T) {
	h := newHall(t, 3, 100)
	a, b, c := h.cursors[0], h.cursors[1], h.cursors[2]
	h.fill(a)
	h.fill(b)
	h.fill(c)
	b.Disown(owner.Epoch)   // it waits before c
	h.ack(a, 2*openShare+2) // room for two: a and b have waited longest
	if !slices.Contains(h.fx.Ready, b) || slices.Contains(h.fx.Ready, c) {
		t.Fatalf("ready are %v, want those that have waited longest", h.fx.Ready)
	}
	h.fx.Reset()
	if h.book.Tick(0, &h.fx); !slices.Contains(h.fx.Ready, c) || h.fill(c) == 0 {
		t.Fatalf("ready are %v, want the next one", h.fx.Ready)
	}
}
