package ledger

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

const (
	group, topic, partition = 3, 5, 7
	second                  = time.Second
)

var (
	key   = Key{Group: group, Topic: topic, Partition: partition}
	owner = Owner{Member: 11, Epoch: 4}
)

// bench is a book with one cursor and the host's part of the protocol: it carries records from the queue to Apply.
type bench struct {
	t      testing.TB
	book   *Book
	c      *Cursor
	opts   Options
	now    time.Duration
	wallMs uint64
	fx     Effects
	id     DeliveryID
	log    [][]byte // committed records
}

func newBench(t testing.TB, adjust func(*Options)) *bench {
	b := &bench{t: t, opts: DefaultOptions(), wallMs: 1_700_000_000_000, now: 5 * second}
	if adjust != nil {
		adjust(&b.opts)
	}
	if err := b.opts.Validate(); err != nil {
		t.Fatal(err)
	}
	b.book = NewBook(rand.NewPCG(1, 2), nil)
	b.book.Restore(b.now, b.wallMs, &b.fx)
	b.c = b.book.Open(key, &b.opts, 0)
	b.commit()
	b.c.Own(owner)
	return b
}

// commit proposes what is queued and applies it.
func (b *bench) commit() {
	b.t.Helper()
	for b.book.Pending() {
		rec := b.book.AppendRecord(nil, b.wallMs)
		if len(rec) == 0 {
			break
		}
		b.log = append(b.log, rec)
		if err := b.book.Apply(rec, b.now, &b.fx); err != nil {
			b.t.Fatal(err)
		}
	}
}

// pass lets time go by, on both clocks.
func (b *bench) pass(d time.Duration) {
	b.now += d
	b.wallMs += uint64(d.Milliseconds())
	b.book.Tick(b.now, &b.fx)
}

type delivery struct {
	seq     Sequence
	id      DeliveryID
	attempt uint16
}

// take delivers the next message, which must exist.
func (b *bench) take() delivery {
	b.t.Helper()
	d, ok := b.tryTake()
	if !ok {
		b.t.Fatal("nothing to deliver")
	}
	return d
}

func (b *bench) tryTake() (delivery, bool) {
	seq, attempt, ok := b.c.Peek(b.now)
	if !ok {
		return delivery{}, false
	}
	b.id++
	b.c.Take(seq, b.id, b.now)
	return delivery{seq, b.id, attempt}, true
}

func (b *bench) ack(d delivery) Verdict {
	return b.c.Ack(d.seq, d.id, owner.Epoch, false, false, b.now)
}

func (b *bench) nack(d delivery) Verdict {
	return b.c.Nack(d.seq, d.id, owner.Epoch, false, false, b.now)
}

// restart throws the book away and builds it anew from the log, as after kill -9.
func (b *bench) restart() {
	b.t.Helper()
	book := NewBook(rand.NewPCG(3, 4), nil)
	for _, rec := range b.log {
		if err := book.Apply(rec, 0, &b.fx); err != nil {
			b.t.Fatal(err)
		}
	}
	b.reopen(book)
}

func (b *bench) reopen(book *Book) {
	b.t.Helper()
	last := b.c.Last()
	b.book, b.c = book, book.Cursor(key)
	if b.c == nil {
		b.t.Fatal("the cursor did not survive")
	}
	b.c.Configure(&b.opts)
	b.fx.Reset()
	b.book.Restore(b.now, b.wallMs, &b.fx)
	b.c.Committed(last)
	b.id += 1 << 20
	b.c.Own(owner)
}

func (b *bench) wantFloor(want Sequence) {
	b.t.Helper()
	if got := b.c.Floor(); got != want {
		b.t.Fatalf("floor %d, want %d", got, want)
	}
}

func (b *bench) wantNothing() {
	b.t.Helper()
	if seq, attempt, ok := b.c.Peek(b.now); ok {
		b.t.Fatalf("message %d is offered (attempt %d), want none", seq, attempt)
	}
}

func TestLedger_FloorWaitsForTheGapAndJumpsWhenItIsFilled(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(5)
	var ds [6]delivery
	for i := 1; i <= 5; i++ {
		ds[i] = b.take()
	}
	b.nack(ds[3])
	for _, i := range []int{1, 2, 4, 5} {
		if v := b.ack(ds[i]); v != Settling {
			t.Fatalf("ACK %d: verdict %d", i, v)
		}
	}
	b.wantFloor(0) // not on record yet
	b.commit()
	b.wantFloor(2)
	if s := b.c.Stats(); s.Depth != 3 || s.Unsettled != 1 || s.Acked != 4 || s.Retrying != 1 {
		t.Fatalf("stats %+v", s)
	}
	b.pass(2 * second)
	d := b.take()
	if d.seq != 3 || d.attempt != 2 {
		t.Fatalf("redelivered %+v, want message 3, attempt 2", d)
	}
	b.ack(d)
	b.commit()
	b.wantFloor(5)
}

func TestLedger_ConsumersDyingInTurnUseUpTheAttempts(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(1)
	for attempt := uint16(1); attempt <= 5; attempt++ {
		d := b.take()
		if d.attempt != attempt {
			t.Fatalf("attempt %d, want %d", d.attempt, attempt)
		}
		b.c.Lost(b.now)
		b.wantNothing()
		b.commit()
		b.wantNothing() // the backoff
		b.pass(31 * second)
	}
	b.wantNothing()
	if len(b.fx.Exhausted) != 1 || b.fx.Exhausted[0].Sequence != 1 || b.fx.Exhausted[0].Failures != 5 {
		t.Fatalf("exhausted %+v, want message 1 once", b.fx.Exhausted)
	}
	b.wantFloor(0)
	if !b.c.Drop(1) || b.c.Drop(1) {
		t.Fatal("DROP was not queued exactly once")
	}
	b.commit()
	b.wantFloor(1)
	if s := b.c.Stats(); s.Dropped != 1 || s.Acked != 0 {
		t.Fatalf("stats %+v", s)
	}
}

func TestLedger_MaximumOfAttemptsIsObeyed(t *testing.T) {
	for _, tc := range []struct {
		name    string
		max     int
		ordered bool
	}{
		{"one", 1, false}, {"five", 5, false}, {"one, ordered", 1, true}, {"five, ordered", 5, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBench(t, func(o *Options) { o.MaxAttempts, o.Ordered = tc.max, tc.ordered })
			b.c.Committed(1)
			n := 0
			for {
				d, ok := b.tryTake()
				if !ok {
					break
				}
				n++
				b.nack(d)
				b.commit()
				b.pass(60 * second)
			}
			if n != tc.max || len(b.fx.Exhausted) != 1 {
				t.Fatalf("%d deliveries and %d exhausted, want %d and 1", n, len(b.fx.Exhausted), tc.max)
			}
		})
	}
	t.Run("no maximum", func(t *testing.T) {
		b := newBench(t, func(o *Options) { o.MaxAttempts = 0 })
		b.c.Committed(1)
		for range 100 {
			b.nack(b.take())
			b.commit()
			b.pass(60 * second)
		}
	})
	bad := DefaultOptions()
	bad.MaxAttempts, bad.Lease, bad.MaxOpen = -1, 0, maxOpen+1
	if bad.Validate() == nil {
		t.Fatal("impossible options pass")
	}
}

func TestLedger_RejectedMessageIsExhaustedAtOnce(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(2)
	d := b.take()
	if v := b.c.Nack(d.seq, d.id, owner.Epoch, true, false, b.now); v != Settling {
		t.Fatalf("verdict %d", v)
	}
	b.commit()
	if len(b.fx.Exhausted) != 1 || b.fx.Exhausted[0].Reason != ReasonRejected {
		t.Fatalf("exhausted %+v", b.fx.Exhausted)
	}
	b.pass(100 * second)
	if d := b.take(); d.seq != 2 {
		t.Fatalf("message %d is delivered, want 2", d.seq)
	}
	b.wantNothing()
}

func TestLedger_ParkedMessageSurvivesRestartsUntilDropped(t *testing.T) {
	b := newBench(t, func(o *Options) { o.MaxAttempts = 1 })
	b.c.Committed(2)
	b.nack(b.take())
	b.commit()
	if !b.c.Park(1, 77) || b.c.Park(1, 77) {
		t.Fatal("EXHAUSTED was not queued exactly once")
	}
	b.commit()
	want := func(when string) {
		t.Helper()
		if len(b.fx.Parked) != 1 || b.fx.Parked[0].Sequence != 1 || b.fx.Parked[0].Letters != 77 {
			t.Fatalf("%s: parked %+v", when, b.fx.Parked)
		}
	}
	want("committed")
	b.restart()
	want("restarted")
	if !b.c.Drop(1) {
		t.Fatal("DROP refused")
	}
	// The DROP is queued, a snapshot is taken, and the broker dies before it is on record.
	snap := b.book.AppendSnapshot(nil, b.now, b.wallMs)
	book := NewBook(rand.NewPCG(0, 0), nil)
	if err := book.Load(snap); err != nil {
		t.Fatal(err)
	}
	b.reopen(book)
	want("restored from a snapshot")
	b.c.Drop(1)
	b.commit()
	b.wantFloor(1)
	if s, n := b.c.Stats(), (Counts{Dropped: 1, Buried: 1}); s.Counts != n || s.Run != n {
		t.Fatalf("stats %+v, want one message with a dead letter", s)
	}
	b.restart()
	if s, n := b.c.Stats(), (Counts{Dropped: 1, Buried: 1}); s.Counts != n || s.Run != (Counts{}) {
		t.Fatalf("after the restart stats %+v", s)
	}
}

func TestLedger_RestartRedeliversUnacknowledgedOnlyAndUsesNoAttempt(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(100)
	var ds []delivery
	for range 50 {
		ds = append(ds, b.take())
	}
	for i, d := range ds {
		if i%3 != 0 {
			b.ack(d)
		}
	}
	b.commit()
	b.ack(ds[0]) // never gets on record
	b.restart()
	want := map[Sequence]bool{}
	for i, d := range ds {
		if i%3 == 0 {
			want[d.seq] = true
		}
	}
	for seq := Sequence(51); seq <= 100; seq++ {
		want[seq] = true
	}
	prev := Sequence(0)
	for range len(want) {
		d := b.take()
		if !want[d.seq] || d.attempt != 1 || d.seq <= prev {
			t.Fatalf("redelivered %+v after %d", d, prev)
		}
		prev = d.seq
	}
	b.wantNothing()
	if v := b.ack(ds[0]); v != UnknownDelivery {
		t.Fatalf("an ACK from before the restart: verdict %d", v)
	}
}

func TestLedger_AttemptsSurviveARestart(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(1)
	for range 3 {
		b.nack(b.take())
		b.commit()
		b.pass(31 * second)
	}
	b.restart()
	n := 0
	for {
		d, ok := b.tryTake()
		if !ok {
			break
		}
		n++
		if want := uint16(3 + n); d.attempt != want {
			t.Fatalf("attempt %d, want %d", d.attempt, want)
		}
		b.nack(d)
		b.commit()
		b.pass(31 * second)
	}
	if n != 2 || len(b.fx.Exhausted) != 1 {
		t.Fatalf("%d more deliveries, %d exhausted; want 2 and 1", n, len(b.fx.Exhausted))
	}
}

func TestLedger_OneGapAmongManyIsOneRedelivery(t *testing.T) {
	const n = 100_000
	b := newBench(t, nil)
	b.c.Committed(n)
	for range n {
		if d := b.take(); d.seq != 777 {
			b.ack(d)
		}
		b.commit()
	}
	b.wantFloor(776)
	if got := len(b.c.win.ring); got > 256 {
		t.Errorf("the window has room for %d entries with one open message", got)
	}
	b.log = b.log[len(b.log):]
	snap := b.book.AppendSnapshot(nil, b.now, b.wallMs)
	if len(snap) > 200 {
		t.Errorf("the snapshot has %d bytes for one open message", len(snap))
	}
	book := NewBook(rand.NewPCG(0, 0), nil)
	if err := book.Load(snap); err != nil {
		t.Fatal(err)
	}
	b.reopen(book)
	if d := b.take(); d.seq != 777 {
		t.Fatalf("redelivered %d, want 777", d.seq)
	}
	b.wantNothing()
}

func TestLedger_WallClockStepsDisturbNothing(t *testing.T) {
	for _, step := range []int64{-3_600_000, 3_600_000} {
		b := newBench(t, nil)
		b.c.Committed(2)
		d := b.take()
		b.nack(b.take())
		b.commit()
		b.wallMs = uint64(int64(b.wallMs) + step)
		b.book.Tick(b.now, &b.fx)
		b.wantNothing()
		if v := b.ack(d); v != Settling {
			t.Fatalf("step %d ms: the lease ended", step)
		}
		b.commit()
		// Not even a restart waits longer than the whole delay.
		b.restart()
		if step > 0 {
			if d := b.take(); d.seq != 2 {
				t.Fatalf("delivered %d, want 2", d.seq)
			}
			continue
		}
		b.wantNothing()
		b.pass(2 * second)
		if d := b.take(); d.seq != 2 || d.attempt != 2 {
			t.Fatalf("delivered %+v, want message 2, attempt 2", d)
		}
	}
}

func TestLedger_RestartWaitsForTheRestOfTheDelay(t *testing.T) {
	b := newBench(t, func(o *Options) { o.Backoff = []time.Duration{20 * second}; o.JitterPercent = 0 })
	b.c.Committed(1)
	b.nack(b.take())
	b.commit()
	b.pass(12 * second)
	b.restart()
	b.pass(7 * second)
	b.wantNothing()
	b.pass(2 * second)
	b.take()
}

func TestLedger_LateAckIsRefusedAndTheNewDeliveryStands(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(1)
	old := b.take()
	b.pass(31 * second)
	if v := b.ack(old); v != UnknownDelivery {
		t.Fatalf("before the redelivery: verdict %d", v)
	}
	b.wantNothing() // the failure is not on record
	b.commit()
	b.pass(2 * second)
	d := b.take()
	if d.attempt != 2 {
		t.Fatalf("attempt %d, want 2", d.attempt)
	}
	if v := b.ack(old); v != UnknownDelivery {
		t.Fatalf("after the redelivery: verdict %d", v)
	}
	if v := b.ack(d); v != Settling {
		t.Fatalf("the new delivery: verdict %d", v)
	}
	if v := b.ack(d); v != UnknownDelivery {
		t.Fatalf("the new delivery again: verdict %d", v)
	}
	b.commit()
	b.wantFloor(1)
}

func TestLedger_ProgressRenewsTheLease(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(2)
	d, other := b.take(), b.take()
	for range 5 {
		b.pass(20 * second)
		if v := b.c.Ack(d.seq, d.id, owner.Epoch, true, false, b.now); v != Renewed {
			t.Fatalf("verdict %d", v)
		}
	}
	b.commit()
	if v := b.ack(other); v != UnknownDelivery {
		t.Fatalf("the message without PROGRESS: verdict %d", v)
	}
	if v := b.ack(d); v != Settling {
		t.Fatalf("the message with PROGRESS: verdict %d", v)
	}
}

func TestLedger_CumulativeAckCoversEarlierDeliveriesOnly(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(10)
	first := b.take()
	b.nack(first)
	b.commit()
	var d delivery
	for range 5 {
		d = b.take()
	} // 2..6
	b.pass(2 * second)
	again := b.take()
	if again.seq != 1 {
		t.Fatalf("redelivered %d, want 1", again.seq)
	}
	if v := b.c.Ack(d.seq, d.id, owner.Epoch, false, true, b.now); v != Settling {
		t.Fatalf("verdict %d", v)
	}
	b.commit()
	b.wantFloor(0) // message 1 was delivered again behind message 6
	if v := b.c.Ack(d.seq, d.id, owner.Epoch, false, true, b.now); v != UnknownDelivery {
		t.Fatalf("with nothing left: verdict %d", v)
	}
	b.ack(again)
	b.commit()
	b.wantFloor(6)
}

func TestLedger_StaleOwnersAreRefusedByEpoch(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(3)
	d := b.take()
	b.c.Return()
	b.c.Disown(owner.Epoch + 1)
	if b.c.Owner() != owner {
		t.Fatal("a stale epoch took the partition away")
	}
	b.c.Disown(owner.Epoch)
	b.wantNothing()
	if v := b.ack(d); v != StaleOwner {
		t.Fatalf("without an owner: verdict %d", v)
	}
	next := Owner{Member: 12, Epoch: 5}
	b.c.Own(next)
	n := b.take()
	if n.seq != d.seq || n.attempt != 1 {
		t.Fatalf("the new owner got %+v, want message %d, attempt 1", n, d.seq)
	}
	if v := b.ack(d); v != StaleOwner {
		t.Fatalf("the old owner's ACK: verdict %d", v)
	}
	if v := b.nack(d); v != StaleOwner {
		t.Fatalf("the old owner's NACK: verdict %d", v)
	}
	if v := b.c.Ack(n.seq, n.id, next.Epoch, false, false, b.now); v != Settling {
		t.Fatalf("the new owner's ACK: verdict %d", v)
	}
}

func TestLedger_FailuresStopCountingAtTheirMaximum(t *testing.T) {
	b := newBench(t, func(o *Options) { o.MaxAttempts = 0 })
	b.c.Committed(1)
	for range maxFailures + 3 {
		d := b.take()
		b.c.Nack(d.seq, d.id, owner.Epoch, false, true, b.now)
		b.commit()
		b.log = b.log[:0]
	}
	if d := b.take(); d.attempt != maxFailures+1 {
		t.Fatalf("attempt %d", d.attempt)
	}
}

func TestLedger_CumulativeProgressRenewsAllLeases(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(3)
	b.take()
	b.take()
	d := b.take()
	b.pass(20 * second)
	if v := b.c.Ack(d.seq, d.id, owner.Epoch, true, true, b.now); v != Renewed {
		t.Fatalf("verdict %d", v)
	}
	b.pass(20 * second)
	if n := b.c.InFlight(); n != 3 {
		t.Fatalf("%d in flight", n)
	}
}

func TestLedger_DiscardedRetryCountsAsDropped(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(2)
	d := b.take()
	if b.c.Discard(d.seq) {
		t.Fatal("a message in flight was discarded")
	}
	b.nack(d)
	b.commit()
	if !b.c.Discard(d.seq) || b.c.Discard(d.seq) {
		t.Fatal("the DROP was not queued exactly once")
	}
	b.pass(60 * second)
	b.commit()
	b.wantFloor(1)
	if s := b.c.Stats(); s.Dropped != 1 || s.Retrying != 0 {
		t.Fatalf("stats %+v", s)
	}
}

func TestBook_DeadlinesOfManyCursorsComeInTheirOrder(t *testing.T) {
	rnd := rand.New(rand.NewPCG(8, 8))
	book, fx, opts := NewBook(rand.NewPCG(1, 1), nil), Effects{}, DefaultOptions()
	book.Restore(0, 0, &fx)
	now := time.Duration(0)
	commit := func() {
		for book.Pending() {
			if err := book.Apply(book.AppendRecord(nil, 0), now, &fx); err != nil {
				t.Fatal(err)
			}
		}
	}
	var cursors []*Cursor
	for i := range 300 {
		c := book.Open(Key{Group: uint16(i%7) + 1, Topic: uint16(i/7) + 1, Member: uint64(i % 3)}, &opts, 0)
		c.Committed(1000)
		c.Own(owner)
		cursors = append(cursors, c)
	}
	commit()
	// until is when the lease of a cursor's one delivery ends, 0 if it has none.
	until := map[*Cursor]time.Duration{}
	id := DeliveryID(0)
	for range 3000 {
		c := cursors[rnd.IntN(len(cursors))]
		switch seq, _, ok := c.Peek(now); {
		case until[c] == 0 && ok:
			id++
			c.Take(seq, id, now)
			until[c] = roundUp(now + opts.Lease)
		case until[c] != 0 && rnd.IntN(2) == 0:
			if c.Ack(c.Next()-1, id, owner.Epoch, false, true, now) == Settling {
				until[c] = 0
			}
			commit()
		}
		now += time.Duration(rnd.Int64N(int64(300 * time.Millisecond)))
		next := book.Tick(now, &fx)
		if next >= 0 && next <= now {
			t.Fatalf("at %v the next deadline is %v", now, next)
		}
		for _, c := range cursors {
			switch end := until[c]; {
			case end == 0:
			case end <= now:
				if c.InFlight() != 0 {
					t.Fatalf("at %v a lease that ended at %v is still there", now, end)
				}
				until[c] = 0
			case c.InFlight() != 1 || next > end:
				t.Fatalf("at %v a lease that ends at %v: %d in flight, next deadline %v", now, end, c.InFlight(), next)
			}
		}
		commit()
	}
	// Those that are forgotten leave no deadline behind.
	for _, c := range cursors {
		book.Forget(c)
	}
	commit()
	if next := book.Tick(now+time.Hour, &fx); next >= 0 || len(book.timers) != 0 {
		t.Fatalf("next deadline %v", next)
	}
}

func TestLedger_RetryNowWaitsForItsRecordOnly(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(2)
	d := b.take()
	b.c.Nack(d.seq, d.id, owner.Epoch, false, true, b.now)
	b.fx.Reset()
	b.commit()
	if len(b.fx.Ready) != 1 || b.fx.Ready[0] != b.c {
		t.Fatal("the cursor is not reported as ready")
	}
	if r := b.take(); r.seq != d.seq || r.attempt != 2 {
		t.Fatalf("delivered %+v, want message %d, attempt 2", r, d.seq)
	}
}

// The host reads its clock, folds what has committed, and calls Tick: a retry may be due by then that no Tick has seen yet.
func TestLedger_RetryThatIsDueIsOfferedThoughAnotherFailsMeanwhile(t *testing.T) {
	b := newBench(t, func(o *Options) { o.Fixed([]time.Duration{second, 10 * second}) })
	b.c.Committed(2)
	one, two := b.take(), b.take()
	b.nack(one)
	b.commit() // message 1 waits for a second
	b.pass(second / 2)
	b.nack(two)
	rec := b.book.AppendRecord(nil, b.wallMs)
	b.now += second // it is due, and the record comes back before the Tick
	b.fx.Reset()
	if err := b.book.Apply(rec, b.now, &b.fx); err != nil {
		t.Fatal(err)
	}
	b.book.Tick(b.now, &b.fx)
	if !slices.Contains(b.fx.Ready, b.c) {
		t.Fatal("message 1 is due and was not offered")
	}
	if d := b.take(); d.seq != 1 || d.attempt != 2 {
		t.Fatalf("message %d came, attempt %d", d.seq, d.attempt)
	}
}

func TestLedger_BackoffGrowsUpToTheCap(t *testing.T) {
	o := DefaultOptions()
	src := rand.NewPCG(5, 6)
	for i, base := range []time.Duration{1, 2, 4, 8, 16, 30, 30, 30} {
		base *= second
		for range 1000 {
			if d := o.delay(i+1, src); d < base || d > min(base+base/4, 30*second) {
				t.Fatalf("after %d failures the delay is %v, want %v and up to a quarter more, at most 30 s", i+1, d, base)
			}
		}
	}
}

func TestLedger_OrderedGroupHoldsBackUntilTheMessageBeforeIsDone(t *testing.T) {
	b := newBench(t, func(o *Options) { o.Ordered = true })
	b.c.Committed(3)
	d := b.take()
	b.wantNothing()
	b.nack(d)
	b.commit()
	b.wantNothing()
	b.pass(2 * second)
	d = b.take()
	if d.seq != 1 || d.attempt != 2 {
		t.Fatalf("delivered %+v, want message 1, attempt 2", d)
	}
	b.ack(d)
	b.wantNothing()
	b.fx.Reset()
	b.commit()
	if len(b.fx.Ready) == 0 {
		t.Fatal("the cursor is not reported as ready")
	}
	if d = b.take(); d.seq != 2 {
		t.Fatalf("delivered %d, want 2", d.seq)
	}
}

func TestLedger_OpenMessagesAreBounded(t *testing.T) {
	b := newBench(t, func(o *Options) { o.MaxOpen = 4 })
	b.c.Committed(10)
	var ds []delivery
	for range 4 {
		ds = append(ds, b.take())
	}
	b.wantNothing()
	b.ack(ds[2])
	b.fx.Reset()
	b.commit()
	if len(b.fx.Ready) == 0 {
		t.Fatal("the cursor is not reported as ready")
	}
	if d := b.take(); d.seq != 5 {
		t.Fatalf("delivered %d, want 5", d.seq)
	}
	b.wantNothing()
}

func TestLedger_SkippedMessagesCountAsDropped(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(100)
	d := b.take()
	b.c.Skip(41)
	b.wantNothing()
	b.wantFloor(0)
	b.commit()
	b.wantFloor(0)
	if n := b.take(); n.seq != 41 {
		t.Fatalf("delivered %d, want 41", n.seq)
	}
	b.ack(d)
	b.commit()
	b.wantFloor(40)
	if s := b.c.Stats(); s.Dropped != 39 || s.Acked != 1 || s.Acked+s.Dropped+s.Unsettled != 100 {
		t.Fatalf("stats %+v", s)
	}
	b.restart()
	b.wantFloor(40)
}

func TestLedger_SeekForgetsWhatWasInFlight(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(10)
	d := b.take()
	for range 5 {
		b.take()
	}
	b.c.Seek(2)
	b.wantNothing()
	if v := b.ack(d); v != UnknownDelivery {
		t.Fatalf("verdict %d", v)
	}
	b.c.Lost(b.now) // without effect
	b.pass(60 * second)
	b.commit()
	b.wantFloor(2)
	if n := b.take(); n.seq != 3 || n.attempt != 1 {
		t.Fatalf("delivered %+v, want message 3, attempt 1", n)
	}
	b.commit()
	b.restart()
	b.wantFloor(2)
}

func TestLedger_ForgottenCursorIsGone(t *testing.T) {
	b := newBench(t, nil)
	b.c.Committed(10)
	b.ack(b.take())
	b.take()
	b.book.Forget(b.c)
	b.wantNothing()
	b.c.Lost(b.now)
	b.fx.Reset()
	b.commit()
	if len(b.fx.Forgotten) != 1 || b.book.Cursor(key) != nil || len(b.book.Cursors()) != 0 || b.book.Pending() {
		t.Fatalf("the cursor is still there: %+v", b.fx.Forgotten)
	}
	// One that never got its START on record needs no special case.
	b.book.Forget(b.book.Open(key, &b.opts, 9))
	b.commit()
	if b.book.Cursor(key) != nil {
		t.Fatal("the cursor is still there")
	}
}

func TestLedger_RecordsOutOfPlaceAreErrors(t *testing.T) {
	rec := func(kind Kind, body func(*writer)) []byte {
		w := writer{buf: []byte{recordVersion1}, limit: 1 << 20}
		w.header(kind, key)
		body(&w)
		return w.buf
	}
	runs := func(first uint64, count uint32) func(*writer) {
		return func(w *writer) { w.u32(1); w.u64(first); w.u32(count) }
	}
	start := rec(KindStart, func(w *writer) { w.u64(0) })
	deliver := func(first uint64, count uint32) []byte {
		return rec(KindDeliver, func(w *writer) {
			w.u64(1)
			w.u64(1)
			w.u64(1)
			w.u32(1)
			w.u64(first)
			w.u32(count)
			w.u64(1)
		})
	}
	for name, recs := range map[string][][]byte{
		"no START":              {deliver(1, 1)},
		"ACK of what is fresh":  {start, rec(KindAck, runs(1, 1))},
		"ACK beyond delivery":   {start, deliver(1, 3), rec(KindAck, runs(2, 3))},
		"DELIVER with a gap":    {start, deliver(2, 1)},
		"too many open":         {start, deliver(1, maxOpen+1)},
		"DROP with a gap":       {start, rec(KindDrop, runs(3, 1))},
		"EXHAUSTED without one": {start, deliver(1, 1), rec(KindExhausted, func(w *writer) { w.u64(1); w.u64(0) })},
	} {
		t.Run(name, func(t *testing.T) {
			b, fx := NewBook(rand.NewPCG(0, 0), nil), Effects{}
			for i, r := range recs {
				err := b.Apply(r, 0, &fx)
				if last := i == len(recs)-1; last != errors.Is(err, ErrRecord) {
					t.Fatalf("record %d: error %v", i, err)
				}
			}
		})
	}
}

func TestLedger_LargeQueueTakesSeveralRecords(t *testing.T) {
	b := newBench(t, nil)
	const n = 60_000
	b.c.Committed(n)
	var ds []delivery
	for range n {
		ds = append(ds, b.take())
	}
	b.commit()
	before := len(b.log)
	for i := 0; i < n; i += 2 {
		b.ack(ds[i])
	}
	for i := 1; i < n; i += 2 {
		b.nack(ds[i])
	}
	b.commit()
	if got := len(b.log) - before; got < 3 {
		t.Fatalf("%d records", got)
	}
	for _, r := range b.log {
		if len(r) > MaxRecord {
			t.Fatalf("a record of %d bytes", len(r))
		}
	}
	if s := b.c.Stats(); s.Acked != n/2 || s.Retrying != n/2 || s.InFlight != 0 {
		t.Fatalf("stats %+v", s)
	}
}

// steady runs one round of deliveries and acknowledgements in order.
func (b *bench) steady(batch int, buf []byte) []byte {
	b.c.Committed(b.c.Last() + Sequence(batch))
	first := b.c.Next()
	id := b.id + 1
	for range batch {
		seq, _, _ := b.c.Peek(b.now)
		b.id++
		b.c.Take(seq, b.id, b.now)
	}
	for i := range batch {
		b.c.Ack(first+Sequence(i), id+DeliveryID(i), owner.Epoch, false, false, b.now)
	}
	buf = b.book.AppendRecord(buf[:0], b.wallMs)
	b.fx.Reset()
	if err := b.book.Apply(buf, b.now, &b.fx); err != nil {
		b.t.Fatal(err)
	}
	b.now += time.Millisecond
	b.book.Tick(b.now, &b.fx)
	return buf
}

func TestLedger_DeliverAndAckDoNotAllocate(t *testing.T) {
	b := newBench(t, nil)
	var buf []byte
	for range 100 {
		buf = b.steady(256, buf)
	}
	if n := testing.AllocsPerRun(1000, func() { buf = b.steady(256, buf) }); n != 0 {
		t.Fatalf("%v allocations per round", n)
	}
	if b.c.Floor() != b.c.Last() {
		t.Fatalf("floor %d, last %d", b.c.Floor(), b.c.Last())
	}
}

func BenchmarkDeliverAck(b *testing.B) {
	h := newBench(b, nil)
	var buf []byte
	const batch = 256
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		buf = h.steady(batch, buf)
		n += batch
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/msg")
}
