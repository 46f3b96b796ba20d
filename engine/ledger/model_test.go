package ledger

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var (
	modelSeeds = flag.Int("model.seeds", 1000, "number of seeds of the model test")
	modelSteps = flag.Int("model.steps", 1000, "steps per seed of the model test")
	modelSeed  = flag.Uint64("model.seed", 0, "run this seed only")
)

// oracle is the ledger as one would write it without a thought for speed: a map of what became of every message.
type oracle struct {
	max   int
	last  Sequence
	next  Sequence
	msgs  map[Sequence]*oracleMsg
	owner Owner
}

type oracleMsg struct {
	status   string // leased, acking, failing, waiting, exhausted, dropping, acked, dropped
	id       DeliveryID
	failures int           // on record
	until    time.Duration // leased: the deadline
	notBefo  time.Duration // waiting: no earlier than
	notAfter time.Duration // waiting: due by then
	pending  Reason        // failing
}

func (o *oracle) floor() Sequence {
	f := Sequence(0)
	for f+1 < o.next {
		if m := o.msgs[f+1]; m.status != "acked" && m.status != "dropped" {
			break
		}
		f++
	}
	return f
}

func (o *oracle) count(status string) (n int) {
	for _, m := range o.msgs {
		if m.status == status {
			n++
		}
	}
	return n
}

// world drives a book and the oracle through the same events.
type world struct {
	t       *testing.T
	seed    uint64
	step    int
	rnd     *rand.Rand
	opts    Options
	book    *Book
	c       *Cursor
	o       *oracle
	now     time.Duration
	wallMs  uint64
	fx      Effects
	id      DeliveryID
	epoch   uint64
	flying  [][]byte // proposed, not committed
	snap    []byte
	log     [][]byte // committed since snap
	floor   Sequence
	attempt map[Sequence]uint16
	trace   uint64 // a hash of everything that happened, for reproduction
}

func (w *world) fatalf(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d step %d: %s (reproduce with -model.seed=%d)", w.seed, w.step, fmt.Sprintf(format, args...), w.seed)
}

func (w *world) note(v ...uint64) {
	for _, x := range v {
		w.trace = (w.trace ^ x) * 0x100000001b3
	}
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{t: t, seed: seed, rnd: rand.New(rand.NewPCG(seed, 7)), opts: DefaultOptions(), wallMs: 1_700_000_000_000, now: second, attempt: map[Sequence]uint16{}}
	w.opts.MaxAttempts = []int{1, 3, 5}[w.rnd.IntN(3)]
	w.opts.MaxOpen = []int{8, 64, 1000}[w.rnd.IntN(3)]
	w.opts.Ordered = w.rnd.IntN(8) == 0
	w.o = &oracle{max: w.opts.MaxAttempts, next: 1, msgs: map[Sequence]*oracleMsg{}}
	w.book = NewBook(rand.NewPCG(seed, 9))
	w.book.Restore(w.now, w.wallMs, &w.fx)
	w.c = w.book.Open(key, &w.opts, 0)
	w.propose()
	w.commitAll()
	return w
}

func (w *world) propose() {
	for w.book.Pending() {
		rec := w.book.AppendRecord(nil, w.wallMs)
		if len(rec) == 0 {
			return
		}
		w.flying = append(w.flying, rec)
	}
}

func (w *world) commitAll() {
	for len(w.flying) > 0 {
		w.commit()
	}
}

// commit folds the oldest proposed record in both.
func (w *world) commit() {
	if len(w.flying) == 0 {
		return
	}
	rec := w.flying[0]
	w.flying = w.flying[1:]
	w.log = append(w.log, rec)
	w.note(uint64(len(rec)), uint64(rec[len(rec)-1]))
	w.fx.Reset()
	if err := w.book.Apply(rec, w.now, &w.fx); err != nil {
		w.fatalf("%v", err)
	}
	var it Item
	for d := NewDecoder(rec); d.Next(&it); {
		w.o.apply(&it, w.now, w.opts.MaxDelay)
	}
	exhausted := map[Sequence]bool{}
	for _, e := range w.fx.Exhausted {
		if exhausted[e.Sequence] = true; w.o.msgs[e.Sequence].status != "exhausted" {
			w.fatalf("message %d is reported as exhausted, but it is %s", e.Sequence, w.o.msgs[e.Sequence].status)
		}
	}
	for seq, m := range w.o.msgs {
		if m.status == "exhausted" && m.notAfter != -1 && !exhausted[seq] {
			w.fatalf("message %d is exhausted and was not reported", seq)
		}
		if m.status == "exhausted" {
			m.notAfter = -1 // reported
		}
	}
}

func (o *oracle) apply(it *Item, now, cap time.Duration) {
	for i := range it.Len {
		switch it.Kind {
		case KindAck, KindDrop:
			first, n := it.Run(i)
			for s := first; s < first+Sequence(n); s++ {
				if o.msgs[s] == nil {
					o.msgs[s] = &oracleMsg{}
				}
				o.msgs[s].status = map[Kind]string{KindAck: "acked", KindDrop: "dropped"}[it.Kind]
				o.next = max(o.next, s+1)
			}
		case KindFail:
			f := it.Failure(i)
			m := o.msgs[f.Sequence]
			m.failures++
			m.status, m.notBefo, m.notAfter = "waiting", now, now+cap+2*quantum
			if f.DelayMs > 0 {
				m.notBefo = 0 // its delay began at the failure, before the record
			}
			if m.failures >= o.max || f.Reason == ReasonRejected {
				m.status, m.notAfter = "exhausted", 0
			}
		default:
		}
	}
}

func (w *world) deliver() {
	seq, attempt, ok := w.c.Peek(w.now)
	o := w.o
	if !ok {
		if o.owner != (Owner{}) && !w.opts.Ordered && w.c.skip == 0 {
			if open := w.c.win.live; o.next <= o.last && open < w.opts.MaxOpen {
				w.fatalf("nothing is offered, but %d is fresh and %d are open", o.next, open)
			}
			for s, m := range o.msgs {
				if m.status == "waiting" && m.notAfter <= w.now {
					w.fatalf("nothing is offered, but %d waits since %v", s, m.notAfter)
				}
			}
		}
		return
	}
	w.id++
	w.c.Take(seq, w.id, w.now)
	w.note(uint64(seq), uint64(attempt), uint64(w.id))
	m := o.msgs[seq]
	if m == nil {
		if seq != o.next || seq > o.last {
			w.fatalf("message %d is delivered, next is %d, last %d", seq, o.next, o.last)
		}
		m = &oracleMsg{}
		o.msgs[seq] = m
		o.next++
	} else if m.status != "waiting" || m.notBefo > w.now {
		w.fatalf("message %d is delivered, but it is %s until %v", seq, m.status, m.notBefo)
	}
	if w.opts.Ordered && seq != o.floor()+1 {
		w.fatalf("ordered group: message %d is delivered before %d", seq, o.floor()+1)
	}
	if int(attempt) != m.failures+1 || int(attempt) > o.max || attempt < w.attempt[seq] {
		w.fatalf("message %d: attempt %d after %d failures, the one before was %d, maximum %d", seq, attempt, m.failures, w.attempt[seq], o.max)
	}
	w.attempt[seq] = attempt
	m.status, m.id, m.until = "leased", w.id, w.now+w.opts.Lease
}

// pick returns a random message that was handed out, mostly one that is in flight.
func (w *world) pick() (Sequence, *oracleMsg) {
	var candidates []Sequence
	all := w.rnd.IntN(10) == 0
	for _, s := range slices.Sorted(maps.Keys(w.o.msgs)) {
		if all || w.o.msgs[s].status == "leased" {
			candidates = append(candidates, s)
		}
	}
	if len(candidates) == 0 {
		return 0, nil
	}
	s := candidates[w.rnd.IntN(len(candidates))]
	return s, w.o.msgs[s]
}

func (w *world) settle() {
	s, m := w.pick()
	if m == nil {
		return
	}
	id, epoch := m.id, w.o.owner.Epoch
	want := Settling
	if m.status != "leased" {
		want = UnknownDelivery
	}
	switch w.rnd.IntN(12) {
	case 0:
		id, want = id+1<<40, UnknownDelivery
	case 1:
		epoch++
	}
	if epoch != w.o.owner.Epoch || w.o.owner == (Owner{}) {
		want = StaleOwner
	}
	var got Verdict
	switch k := w.rnd.IntN(10); {
	case k < 6:
		got = w.c.Ack(s, id, epoch, false, false, w.now)
		if got == Settling {
			m.status = "acking"
		}
	case k < 7:
		got = w.c.Ack(s, id, epoch, true, false, w.now)
		if got == Renewed {
			got, m.until = Settling, w.now+w.opts.Lease
		}
	case k < 8:
		got = w.c.Nack(s, id, epoch, true, false, w.now)
		if got == Settling {
			m.status, m.pending = "failing", ReasonRejected
		}
	default:
		got = w.c.Nack(s, id, epoch, false, k == 9, w.now)
		if got == Settling {
			m.status, m.pending = "failing", ReasonNack
		}
	}
	w.note(uint64(s), uint64(got))
	if got != want {
		w.fatalf("message %d (%s, delivery %d): verdict %d, want %d", s, m.status, m.id, got, want)
	}
}

func (w *world) cumulative() {
	s, m := w.pick()
	if m == nil || w.o.owner == (Owner{}) {
		return
	}
	want := UnknownDelivery
	for seq, n := range w.o.msgs {
		if seq <= s && n.status == "leased" && n.id <= m.id {
			n.status, want = "acking", Settling
		}
	}
	if got := w.c.Ack(s, m.id, w.o.owner.Epoch, false, true, w.now); got != want {
		w.fatalf("cumulative ACK of %d: verdict %d, want %d", s, got, want)
	}
}

func (w *world) tick(d time.Duration) {
	w.now += d
	w.wallMs += uint64(d.Milliseconds())
	if w.rnd.IntN(50) == 0 {
		w.wallMs = uint64(int64(w.wallMs) + (w.rnd.Int64N(3)-1)*3_600_000)
	}
	w.fx.Reset()
	w.book.Tick(w.now, &w.fx)
	for s, m := range w.o.msgs {
		if m.status != "leased" {
			continue
		}
		switch e := w.c.win.get(s); {
		case e.state == failing && m.until <= w.now:
			m.status, m.pending = "failing", ReasonExpired
		case e.state == failing:
			w.fatalf("the lease of message %d ended at %v, not %v", s, w.now, m.until)
		case m.until+quantum < w.now:
			w.fatalf("the lease of message %d did not end at %v", s, m.until)
		}
	}
}

func (w *world) endLeases(to string) {
	for _, m := range w.o.msgs {
		if m.status == "leased" {
			m.status = to
			m.notBefo, m.notAfter = 0, w.now
		}
	}
}

func (w *world) changeOwner() {
	switch w.rnd.IntN(4) {
	case 0:
		w.c.Lost(w.now)
		w.endLeases("failing")
	case 1:
		w.c.Return()
		w.endLeases("waiting")
		w.c.Disown(w.o.owner.Epoch)
		w.o.owner = Owner{}
	default:
		w.epoch++
		w.o.owner = Owner{Member: w.rnd.Uint64N(5) + 1, Epoch: w.epoch}
		w.c.Own(w.o.owner)
		w.endLeases("waiting")
	}
}

func (w *world) drop() {
	for _, s := range slices.Sorted(maps.Keys(w.o.msgs)) {
		if m := w.o.msgs[s]; m.status == "exhausted" {
			if !w.c.Drop(s) {
				w.fatalf("message %d can't be dropped", s)
			}
			m.status = "dropping"
			return
		}
	}
}

// crash loses what is not committed, and starts anew from the snapshot and the records behind it.
func (w *world) crash() {
	for range w.rnd.IntN(len(w.flying) + 1) {
		w.commit() // these were durable, only nobody was told
	}
	w.flying = nil
	book := NewBook(rand.NewPCG(w.seed, w.rnd.Uint64()))
	if w.snap != nil {
		if err := book.Load(w.snap); err != nil {
			w.fatalf("%v", err)
		}
	}
	for _, r := range w.log {
		if err := book.Apply(r, 0, &w.fx); err != nil {
			w.fatalf("replay: %v", err)
		}
	}
	w.fx.Reset()
	w.book, w.c = book, book.Cursor(key)
	w.c.Configure(&w.opts)
	book.Restore(w.now, w.wallMs, &w.fx)
	w.c.Committed(w.o.last)
	w.o.owner = Owner{}
	// What was delivered and is not on record as delivered is fresh again; all others come back at once or after a rest.
	for s, m := range w.o.msgs {
		if s >= w.c.Next() {
			delete(w.o.msgs, s)
			continue
		}
		switch m.status {
		case "acked", "dropped", "exhausted":
		case "dropping":
			m.status = "exhausted"
		case "waiting":
			m.notBefo, m.notAfter = 0, w.now+w.opts.MaxDelay+2*quantum
		default:
			m.status, m.notBefo, m.notAfter = "waiting", 0, w.now+w.opts.MaxDelay+2*quantum
		}
	}
	w.o.next = w.c.Next()
	reported := map[Sequence]bool{}
	for _, e := range w.fx.Exhausted {
		reported[e.Sequence] = true
	}
	for s, m := range w.o.msgs {
		if (m.status == "exhausted") != reported[s] {
			w.fatalf("after the restart message %d is %s, reported as exhausted: %v", s, m.status, reported[s])
		}
	}
}

func (w *world) snapshot() {
	w.snap = w.book.AppendSnapshot(nil, w.now, w.wallMs)
	w.log = nil
	again := NewBook(rand.NewPCG(0, 0))
	if err := again.Load(w.snap); err != nil {
		w.fatalf("%v", err)
	}
	if b := again.AppendSnapshot(nil, 0, 0); !bytes.Equal(b, w.snap) {
		w.fatalf("the snapshot of a loaded snapshot differs")
	}
}

func (w *world) check() {
	o, s := w.o, w.c.Stats()
	if f := o.floor(); s.Floor != f || f < w.floor {
		w.fatalf("floor %d, want %d, it was %d", s.Floor, f, w.floor)
	}
	w.floor = s.Floor
	if int(s.Acked) != o.count("acked") || int(s.Dropped) != o.count("dropped") {
		w.fatalf("stats %+v, want %d acked, %d dropped", s, o.count("acked"), o.count("dropped"))
	}
	if int(s.InFlight) != o.count("leased")+o.count("acking") {
		w.fatalf("stats %+v, want %d leased + %d acking", s, o.count("leased"), o.count("acking"))
	}
	if s.Acked+s.Dropped+s.Unsettled != uint64(o.last) || s.Depth != uint64(o.last-o.floor()) {
		w.fatalf("stats %+v do not add up to %d", s, o.last)
	}
	if n := w.c.win.live; n > w.opts.MaxOpen {
		w.fatalf("%d open messages", n)
	}
	sum, live := int32(0), 0
	for _, n := range w.c.counts[leased:] {
		sum += n
	}
	for p := w.c.win.head; p != w.c.win.tail; p++ {
		if e := w.c.win.at(p); e.state != done {
			live++
			if m := o.msgs[e.seq]; m == nil || m.status == "acked" || m.status == "dropped" {
				w.fatalf("message %d has an entry in state %d, but is done", e.seq, e.state)
			}
		}
	}
	if int(sum) != live || live != w.c.win.live || int(w.c.counts[waiting]) != len(w.c.retry) {
		w.fatalf("counts %v, window %d live, %d found, %d in the heap", w.c.counts, w.c.win.live, live, len(w.c.retry))
	}
	want := never
	if w.c.timer > 0 {
		want = w.book.timers[w.c.timer-1].wake
	}
	if w.c.wake != want {
		w.fatalf("wake %v, in the heap %v", w.c.wake, want)
	}
}

func (w *world) run(steps int) {
	for w.step = range steps {
		switch k := w.rnd.IntN(100); {
		case k < 15:
			w.o.last += Sequence(w.rnd.IntN(4))
			w.c.Committed(w.o.last)
		case k < 45:
			w.deliver()
		case k < 65:
			w.settle()
		case k < 68:
			w.cumulative()
		case k < 76:
			w.propose()
		case k < 86:
			w.commit()
		case k < 92:
			w.tick(time.Duration(w.rnd.Int64N(int64(12 * second))))
		case k < 95:
			w.changeOwner()
		case k < 97:
			w.drop()
		case k < 98:
			w.snapshot()
		case k < 99:
			w.crash()
		default:
			w.tick(time.Duration(w.rnd.Int64N(int64(second))))
		}
		w.check()
	}
	w.drain()
}

// drain is the liveness phase: with a consumer that acknowledges everything, everything ends.
func (w *world) drain() {
	w.epoch++
	w.o.owner = Owner{Member: 1, Epoch: w.epoch}
	w.c.Own(w.o.owner)
	w.endLeases("waiting")
	for range 20 * (len(w.o.msgs) + int(w.o.last) + 10) {
		w.step++
		w.deliver()
		for _, s := range slices.Sorted(maps.Keys(w.o.msgs)) {
			if m := w.o.msgs[s]; m.status == "leased" {
				if w.c.Ack(s, m.id, w.epoch, false, false, w.now) == Settling {
					m.status = "acking"
				}
			}
		}
		w.drop()
		w.propose()
		w.commitAll()
		w.check()
		if w.c.Floor() == w.o.last {
			return
		}
		w.tick(second)
	}
	w.fatalf("floor %d of %d at the end", w.c.Floor(), w.o.last)
}

func TestLedger_RandomRunsAgreeWithTheOracle(t *testing.T) {
	if *modelSeed != 0 {
		newWorld(t, *modelSeed).run(*modelSteps)
		return
	}
	n := *modelSeeds
	if testing.Short() || raceBuild {
		n /= 10
	}
	for seed := range n {
		newWorld(t, uint64(seed)+1).run(*modelSteps)
	}
}

func TestLedger_RunsReproduceBitForBit(t *testing.T) {
	a, b := newWorld(t, 42), newWorld(t, 42)
	a.run(2000)
	b.run(2000)
	if a.trace != b.trace || !bytes.Equal(a.book.AppendSnapshot(nil, a.now, a.wallMs), b.book.AppendSnapshot(nil, b.now, b.wallMs)) {
		t.Fatal("two runs of one seed differ")
	}
}
