package ledger

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// full is a bench with n messages in flight.
func full(t testing.TB, n int) (*bench, []delivery) {
	b := newBench(t, nil)
	b.c.Committed(Sequence(n))
	ds := make([]delivery, n)
	for i := range ds {
		ds[i] = b.take()
	}
	b.commit()
	return b, ds
}

// A client may repeat what changes nothing as often as it likes, however many messages are open: this test ends soon or,
// if each of them is looked at, never.
func TestLedger_RequestsThatFitNothingAreCheapInAWideWindow(t *testing.T) {
	const n = 1 << 17
	b, ds := full(t, n)
	times := 1 << 16
	if raceBuild {
		times >>= 7
	}
	for range times {
		for _, progress := range []bool{false, true} {
			if v := b.c.Ack(n, ds[0].id-1, owner.Epoch, progress, true, b.now); v != UnknownDelivery {
				t.Fatalf("a cumulative ACK from before all deliveries: verdict %d", v)
			}
		}
		if v := b.c.Nack(n, ds[0].id, owner.Epoch, false, false, b.now); v != UnknownDelivery {
			t.Fatalf("a NACK of another delivery: verdict %d", v)
		}
		if v := b.c.Ack(n/2, ds[n/2].id, owner.Epoch, true, true, b.now); v != Renewed {
			t.Fatalf("a cumulative PROGRESS: verdict %d", v)
		}
	}
}

func TestLedger_LeasesThatEndOneByOneAreCheapInAWideWindow(t *testing.T) {
	const n = 1 << 17
	b := newBench(t, nil)
	b.c.Committed(n)
	for range n {
		b.take()
		b.now += quantum / 64 // 64 leases end in each quantum
	}
	b.commit()
	for b.c.InFlight() > 0 {
		b.now += quantum
		b.book.Tick(b.now, &b.fx)
	}
}

func TestLedger_RetriesThatAreStoredNoMoreAreCheapToDrop(t *testing.T) {
	const n = 1 << 17
	b, _ := full(t, n)
	b.c.Return()
	for seq := Sequence(n); seq > 0; seq-- {
		if !b.c.Discard(seq) {
			t.Fatalf("message %d is not waiting", seq)
		}
	}
	b.wantNothing()
	b.commit()
	b.wantFloor(n)
}

// The walk finds what a look at each entry finds, in the order of the sequences, wherever the window lies in its ring.
func TestLeases_WalkEqualsASearchEntryByEntry(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 5))
	for round := range 3000 {
		var w window
		w.resize(16 << rnd.IntN(6))
		w.head = rnd.Uint64N(1000)
		w.tail = w.head
		for range rnd.IntN(len(w.ring) + 1) {
			w.push(entry{seq: Sequence(w.tail), delivery: DeliveryID(rnd.IntN(100)), at: time.Duration(rnd.IntN(100)), state: state(rnd.IntN(2))})
			if p := w.tail - 1; w.at(p).state == leased {
				w.lease(p)
			}
		}
		for p := w.head; p != w.tail; p++ { // some end again, so that the marks' bounds are not exact
			if e := w.at(p); e.state == leased && rnd.IntN(3) == 0 {
				w.unlease(p)
				e.state = done
			}
		}
		end := w.head + rnd.Uint64N(w.tail-w.head+1)
		delivery, until := DeliveryID(rnd.IntN(110)), time.Duration(rnd.IntN(110))
		var got, want []uint64
		l := w.leases(end, delivery, until)
		for p, ok := l.next(); ok; p, ok = l.next() {
			got = append(got, p)
		}
		for p := w.head; p != end; p++ {
			if e := w.at(p); e.state == leased && e.delivery <= delivery && e.at <= until {
				want = append(want, p)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("round %d, ring of %d from %d to %d, end %d: got %v, want %v", round, len(w.ring), w.head, w.tail, end, got, want)
		}
	}
}

func BenchmarkLedger_CumulativeAckThatFitsNothing(b *testing.B) {
	for _, open := range []int{1 << 10, 1 << 14, 1 << 17} {
		b.Run(fmt.Sprintf("open=%d", open), func(b *testing.B) {
			h, ds := full(b, open)
			for b.Loop() {
				h.c.Ack(Sequence(open), ds[0].id-1, owner.Epoch, false, true, h.now)
			}
		})
	}
}
