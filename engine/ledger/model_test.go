package ledger

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var (
	modelSeeds = flag.Int("model.seeds", 1000, "number of seeds of the model test")
	modelSteps = flag.Int("model.steps", 1000, "steps per seed of the model test")
	modelFirst = flag.Int("model.first", 0, "seeds to leave out before the first one of the model test")
	modelSeed  = flag.Uint64("model.seed", 0, "run this seed only")
)

// world drives the cursors of a book, and an oracle for each, through the same events: deliveries, ACKs and NACKs that are
// lost, late, repeated or wrong, owners that come, go and lose their connections, time, moves of the cursors, messages that
// are stored no more, records that commit late, and crashes that lose those that have not.
type world struct {
	t        *testing.T
	seed     uint64
	step     int
	rnd      *rand.Rand
	opts     Options
	most     int // of the room
	room     *Room
	book     *Book
	subjects []*subject
	byCursor map[*Cursor]*subject
	now      time.Duration
	wallMs   uint64
	fx       Effects
	id       DeliveryID
	epoch    uint64
	flying   [][]byte // proposed, not committed
	snap     []byte
	log      [][]byte // committed since snap
	trace    uint64   // a hash of everything that happened, for reproduction
}

// subject is a cursor and what is known of it.
type subject struct {
	key   Key
	c     *Cursor
	o     *oracle
	opts  Options
	floor Sequence
	// idle: it had nothing to offer when it was asked, and has not been reported as ready since.
	idle bool
	// most is the highest maximum of attempts that it ever had, 0 for none.
	most int
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
	w := &world{t: t, seed: seed, rnd: rand.New(rand.NewPCG(seed, 7)), opts: DefaultOptions(), wallMs: 1_700_000_000_000, now: second}
	w.opts.MaxAttempts = []int{1, 3, 5, 0}[w.rnd.IntN(4)]
	w.opts.MaxOpen = []int{8, 64, 1000}[w.rnd.IntN(3)]
	w.opts.Ordered = w.rnd.IntN(8) == 0
	w.most = []int{1000, 100, 20, 1}[w.rnd.IntN(4)]
	w.room = NewRoom(w.most)
	w.book = NewBook(rand.NewPCG(seed, 9), w.room)
	w.book.Restore(w.now, w.wallMs, &w.fx)
	for i := range 1 + w.rnd.IntN(3) {
		s := &subject{key: Key{Group: group, Topic: topic, Partition: uint16(i), Member: uint64(i / 2)}, opts: w.opts, most: w.opts.MaxAttempts}
		s.o = newOracle(&s.opts)
		s.c = w.book.Open(s.key, &s.opts, 0)
		s.o.moves = []Sequence{0}
		w.subjects = append(w.subjects, s)
	}
	w.rename()
	w.propose()
	w.commitAll()
	return w
}

func (w *world) rename() {
	w.byCursor = map[*Cursor]*subject{}
	for _, s := range w.subjects {
		w.byCursor[s.c] = s
	}
}

func (w *world) of(k Key) *subject {
	return w.subjects[slices.IndexFunc(w.subjects, func(s *subject) bool { return s.key == k })]
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
	if err := w.book.Apply(rec, w.now, &w.fx); err != nil {
		w.fatalf("%v", err)
	}
	var it Item
	for d := NewDecoder(rec); d.Next(&it); {
		s := w.of(it.Key)
		s.o.apply(&it, w.now)
		if it.Kind == KindStart {
			s.floor = it.Floor
		}
	}
	w.effects(false)
}

// effects checks what the book has reported; all says that it is everything that there is to report.
func (w *world) effects(all bool) {
	for _, c := range w.fx.Ready {
		w.byCursor[c].idle = false
	}
	exhausted, parked := map[*oracleMsg]bool{}, map[*oracleMsg]bool{}
	for _, e := range w.fx.Exhausted {
		m := w.byCursor[e.Cursor].o.msgs[e.Sequence]
		if exhausted[m] = true; m == nil || m.status != sExhausted || e.Failures != m.failures || e.Reason != m.reason {
			w.fatalf("%v: message %d is reported as exhausted: %+v, but is %+v", e.Cursor.key, e.Sequence, e, m)
		}
		m.notAfter = -1 // reported
	}
	for _, e := range w.fx.Parked {
		m := w.byCursor[e.Cursor].o.msgs[e.Sequence]
		if parked[m] = true; m == nil || m.status != sParked || e.Letters != m.letters || e.Failures != m.failures {
			w.fatalf("%v: message %d is reported as parked: %+v, but is %+v", e.Cursor.key, e.Sequence, e, m)
		}
	}
	for _, s := range w.subjects {
		for seq, m := range s.o.msgs {
			if m.status == sExhausted && !exhausted[m] && (all || m.notAfter != -1) {
				w.fatalf("%v: message %d is exhausted and was not reported", s.key, seq)
			}
			if m.status == sParked && !parked[m] && all {
				w.fatalf("%v: message %d is parked and was not reported", s.key, seq)
			}
		}
	}
	w.fx.Reset()
}

// mayOpen is how many messages of a cursor may be open, by the oracles.
func (w *world) mayOpen(s *subject) int {
	if w.open() >= w.most {
		return min(s.opts.MaxOpen, openShare)
	}
	return s.opts.MaxOpen
}

func (w *world) open() (n int) {
	for _, s := range w.subjects {
		n += s.o.open()
	}
	return n
}

func (w *world) deliver(s *subject) {
	o := s.o
	seq, attempt, ok := s.c.Peek(w.now)
	if !ok {
		s.idle = true
		if o.owner == (Owner{}) || len(o.moves) > 0 || s.opts.Ordered && o.open() > 0 {
			return
		}
		if open := o.open(); o.next <= o.last && o.skipTo == 0 && open < w.mayOpen(s) {
			w.fatalf("%v: nothing is offered, but %d is fresh and %d are open", s.key, o.next, open)
		}
		for seq, m := range o.msgs {
			if m.status == sWaiting && m.notAfter <= w.now {
				w.fatalf("%v: nothing is offered, but %d waits since %v", s.key, seq, m.notAfter)
			}
		}
		return
	}
	s.idle = false // it is asked again, until it has nothing
	if o.owner == (Owner{}) || len(o.moves) > 0 {
		w.fatalf("%v: message %d is offered to %+v while %d moves are under way", s.key, seq, o.owner, len(o.moves))
	}
	w.id++
	m := o.msgs[seq]
	switch {
	case m != nil && (m.status != sWaiting || m.notBefo > w.now):
		w.fatalf("%v: message %d is delivered, but it is %v until %v", s.key, seq, m.status, m.notBefo)
	case m == nil && (seq != o.next || seq > o.last || o.skipTo != 0 || o.open() >= w.mayOpen(s)):
		w.fatalf("%v: message %d is delivered, next is %d, last %d, skipped up to %d, %d are open", s.key, seq, o.next, o.last, o.skipTo, o.open())
	case s.opts.Ordered && seq != o.floor()+1:
		w.fatalf("%v: ordered group: message %d is delivered before %d", s.key, seq, o.floor()+1)
	}
	s.c.Take(seq, w.id, w.now)
	w.note(uint64(seq), uint64(attempt), uint64(w.id))
	if m == nil {
		m = o.add(seq, sLeased)
	}
	if int(attempt) != m.failures+1 || s.most > 0 && int(attempt) > s.most || attempt < m.attempt {
		w.fatalf("%v: message %d: attempt %d after %d failures, the one before was %d, maximum %d", s.key, seq, attempt, m.failures, m.attempt, s.most)
	}
	m.attempt = attempt
	o.to(m, sLeased)
	m.old, m.id, m.until = m.id, w.id, w.now+s.opts.Lease
}

// settle ends a delivery, or tries to: one in ten concerns a message whatever its state, with the id of a delivery that it
// had, or never had.
func (w *world) settle(s *subject) {
	o := s.o
	seq, m := o.pick(w.rnd, sLeased)
	if w.rnd.IntN(10) == 0 {
		if all := o.sorted(func(*oracleMsg) bool { return true }); len(all) > 0 {
			seq = all[w.rnd.IntN(len(all))]
			m = o.msgs[seq]
		}
	}
	if m == nil {
		return
	}
	id, epoch := m.id, o.owner.Epoch
	want := Settling
	if m.status != sLeased {
		want = UnknownDelivery
	}
	switch w.rnd.IntN(12) {
	case 0:
		id, want = id+1<<40, UnknownDelivery
	case 1:
		epoch++
	case 2:
		if m.old != 0 {
			id, want = m.old, UnknownDelivery
		}
	}
	if epoch != o.owner.Epoch || o.owner == (Owner{}) {
		want = StaleOwner
	}
	if len(o.moves) > 0 {
		want = UnknownDelivery
	}
	var got Verdict
	switch k := w.rnd.IntN(10); {
	case k < 6:
		if got = s.c.Ack(seq, id, epoch, false, false, w.now); got == Settling {
			o.to(m, sAcking)
		}
	case k < 7:
		if got = s.c.Ack(seq, id, epoch, true, false, w.now); got == Renewed {
			got, m.until = Settling, max(m.until, w.now+s.opts.Lease)
		}
	default:
		if got = s.c.Nack(seq, id, epoch, k == 7, k == 9, w.now); got == Settling {
			o.to(m, sFailing)
		}
	}
	w.note(uint64(seq), uint64(got))
	if got != want {
		w.fatalf("%v: message %d (%v, delivery %d): verdict %d, want %d", s.key, seq, m.status, m.id, got, want)
	}
}

// cumulative acknowledges, or renews, everything up to a message.
func (w *world) cumulative(s *subject) {
	o := s.o
	all := o.sorted(func(m *oracleMsg) bool { return m.id != 0 })
	if len(all) == 0 || o.owner == (Owner{}) {
		return
	}
	seq := all[w.rnd.IntN(len(all))]
	id := o.msgs[seq].id
	if w.rnd.IntN(4) == 0 {
		id -= min(id-1, DeliveryID(w.rnd.IntN(20)))
	}
	progress := w.rnd.IntN(3) == 0
	want := UnknownDelivery
	for at, m := range o.msgs {
		if at > seq || m.status != sLeased || m.id > id || len(o.moves) > 0 {
			continue
		}
		if progress {
			m.until, want = max(m.until, w.now+s.opts.Lease), Renewed
		} else {
			o.to(m, sAcking)
			want = Settling
		}
	}
	if got := s.c.Ack(seq, id, o.owner.Epoch, progress, true, w.now); got != want {
		w.fatalf("%v: cumulative ACK of %d: verdict %d, want %d", s.key, seq, got, want)
	}
}

// pass lets time pass. The host reads its clock, handles what has come, and calls Tick at the end of the turn.
func (w *world) pass(d time.Duration) {
	w.now += d
	w.wallMs += uint64(d.Milliseconds())
}

func (w *world) tick(d time.Duration) {
	w.pass(d)
	if w.rnd.IntN(50) == 0 {
		w.wallMs = uint64(int64(w.wallMs) + (w.rnd.Int64N(3)-1)*3_600_000)
	}
	if next := w.book.Tick(w.now, &w.fx); next >= 0 && next <= w.now {
		w.fatalf("at %v the next deadline is %v", w.now, next)
	}
	for _, s := range w.subjects {
		for seq, m := range s.o.msgs {
			if m.status != sLeased || len(s.o.moves) > 0 {
				continue
			}
			switch e := s.c.win.get(seq); {
			case e.state == failing && m.until <= w.now:
				s.o.to(m, sFailing)
			case e.state == failing:
				w.fatalf("%v: the lease of message %d ended at %v, not %v", s.key, seq, w.now, m.until)
			case m.until+quantum < w.now:
				w.fatalf("%v: the lease of message %d did not end at %v", s.key, seq, m.until)
			}
		}
	}
	w.effects(false)
}

func (w *world) changeOwner(s *subject) {
	s.idle = false
	switch w.rnd.IntN(4) {
	case 0:
		if s.c.Lost(w.now); len(s.o.moves) == 0 {
			s.o.endLeases(sFailing, w.now)
		}
	case 1:
		s.c.Return()
		s.o.endLeases(sWaiting, w.now)
		s.c.Disown(s.o.owner.Epoch)
		s.o.owner = Owner{}
	default:
		w.own(s)
	}
}

func (w *world) own(s *subject) {
	s.idle = false
	w.epoch++
	s.o.owner = Owner{Member: w.rnd.Uint64N(5) + 1, Epoch: w.epoch}
	s.c.Own(s.o.owner)
	s.o.endLeases(sWaiting, w.now)
}

// bury takes the next step with a message that is out of attempts.
func (w *world) bury(s *subject) {
	o := s.o
	still := len(o.moves) > 0
	if seq, m := o.pick(w.rnd, sParked); m != nil {
		if s.c.Parked(seq) == still || s.c.Drop(seq) == still || s.c.Drop(seq) {
			w.fatalf("%v: parked message %d can't be dropped once", s.key, seq)
		}
		if !still {
			o.to(m, sBurying)
		}
	}
	seq, m := o.pick(w.rnd, sExhausted)
	switch {
	case m == nil:
	case w.rnd.IntN(2) == 0:
		if s.c.Park(seq, 7) == still || s.c.Park(seq, 7) {
			w.fatalf("%v: message %d can't be parked once", s.key, seq)
		}
		if !still {
			o.to(m, sParking)
		}
	default:
		if s.c.Drop(seq) == still || s.c.Drop(seq) {
			w.fatalf("%v: message %d can't be dropped once", s.key, seq)
		}
		if !still {
			o.to(m, sDropping)
		}
	}
}

// lose has messages that are not stored any more.
func (w *world) lose(s *subject) {
	o := s.o
	if seq, m := o.pick(w.rnd, sWaiting); m != nil && w.rnd.IntN(2) == 0 {
		if gone := s.c.Discard(seq); gone != (len(o.moves) == 0) {
			w.fatalf("%v: message %d is discarded: %t", s.key, seq, gone)
		} else if gone {
			o.to(m, sDropping)
		}
		return
	}
	if n := o.last + 1 - o.next; o.next <= o.last && len(o.moves) == 0 && o.skipTo == 0 {
		first := o.next + Sequence(w.rnd.Uint64N(uint64(n)+1))
		s.c.Skip(first)
		if first > o.next {
			o.skipTo = first
		}
	}
}

// move sets a cursor back or forward. What was on its way to the record before is withdrawn or without effect.
func (w *world) move(s *subject) {
	floor := Sequence(w.rnd.Uint64N(uint64(s.o.last) + 1))
	if s.c.queue == nil || !s.c.queue.seek {
		s.o.moves = append(s.o.moves, floor)
	}
	s.c.Seek(floor)
}

// configure gives a cursor other settings.
func (w *world) configure(s *subject) {
	s.idle = false
	s.opts.MaxAttempts = []int{1, 3, 5, 0}[w.rnd.IntN(4)]
	s.opts.Ordered = w.rnd.IntN(3) == 0
	s.opts.Lease = []time.Duration{second, 30 * second}[w.rnd.IntN(2)]
	if s.opts.MaxAttempts == 0 || s.most > 0 && s.opts.MaxAttempts > s.most {
		s.most = s.opts.MaxAttempts
	}
	s.c.Configure(&s.opts)
}

// crash loses what is not committed, and starts anew from the snapshot and the records behind it.
func (w *world) crash() {
	for range w.rnd.IntN(len(w.flying) + 1) {
		w.commit() // these were durable, only nobody was told
	}
	w.flying = nil
	w.room = NewRoom(w.most)
	book := NewBook(rand.NewPCG(w.seed, w.rnd.Uint64()), w.room)
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
	w.book = book
	for _, s := range w.subjects {
		s.c, s.idle = book.Cursor(s.key), false
		s.c.Configure(&s.opts)
	}
	w.rename()
	book.Restore(w.now, w.wallMs, &w.fx)
	for _, s := range w.subjects {
		s.c.Committed(s.o.last)
		s.o.crash(s.c.Next(), w.now)
	}
	w.effects(true)
}

func (w *world) snapshot() {
	w.snap = w.book.AppendSnapshot(nil, w.now, w.wallMs)
	w.log = nil
	again := NewBook(nil, nil)
	if err := again.Load(w.snap); err != nil {
		w.fatalf("%v", err)
	}
	if b := again.AppendSnapshot(nil, 0, 0); !bytes.Equal(b, w.snap) {
		w.fatalf("the snapshot of a loaded snapshot differs")
	}
}

func (w *world) check() {
	open := 0
	for _, s := range w.subjects {
		w.checkNumbers(s)
		w.checkWindow(s)
		open += s.c.win.live
		if _, _, ok := s.c.Peek(w.now); ok && s.idle {
			w.fatalf("%v has something to offer and was not reported as ready", s.key)
		}
	}
	if open != w.room.Open() {
		w.fatalf("%d messages are open, the room counts %d", open, w.room.Open())
	}
}

func (w *world) checkNumbers(s *subject) {
	o, st := s.o, s.c.Stats()
	if f := o.floor(); st.Floor != f || f < s.floor {
		w.fatalf("%v: floor %d, want %d, it was %d", s.key, st.Floor, f, s.floor)
	}
	s.floor = st.Floor
	n := &o.count
	if int(st.Acked) != n[sAcked] || int(st.Dropped) != n[sDropped]+n[sBuried] || int(st.Buried) != n[sBuried] {
		w.fatalf("%v: stats %+v, want %v", s.key, st, n)
	}
	if int(st.InFlight) != n[sLeased]+n[sAcking] {
		w.fatalf("%v: stats %+v, want %d leased + %d acking", s.key, st, n[sLeased], n[sAcking])
	}
	if st.Start+Sequence(st.Acked+st.Dropped+st.Unsettled) != o.last || st.Depth != uint64(o.last-o.floor()) {
		w.fatalf("%v: stats %+v do not add up to %d", s.key, st, o.last)
	}
	if s.c.win.live != o.open() || s.c.win.live > s.opts.MaxOpen {
		w.fatalf("%v: %d open messages, want %d", s.key, s.c.win.live, o.open())
	}
}

// ends are the states that an entry may have for each status of the oracle.
var states = [...]state{sLeased: leased, sAcking: acking, sFailing: failing, sWaiting: waiting, sExhausted: exhausted,
	sParking: parking, sParked: parked, sDropping: dropping, sBurying: burying}

func (w *world) checkWindow(s *subject) {
	c, win := s.c, &s.c.win
	var counts [burying + 1]int32
	retries := map[retry]bool{}
	for i, r := range c.retry {
		if retries[r] = true; i > 0 && r.before(c.retry[(i-1)/2]) {
			w.fatalf("%v: the retries are no heap: %v", s.key, c.retry)
		}
	}
	marked := make([]uint64, len(win.marks))
	for p := win.head; p != win.tail; p++ {
		e := win.at(p)
		counts[e.state]++
		if e.state == done {
			continue
		}
		if m := s.o.msgs[e.seq]; m == nil || m.status.over() || states[m.status] != e.state {
			w.fatalf("%v: message %d has an entry in state %d, but is %+v", s.key, e.seq, e.state, m)
		}
		if e.state == waiting && !retries[retry{e.at, e.seq}] {
			w.fatalf("%v: message %d waits for a retry that is not in the heap", s.key, e.seq)
		}
		if e.state == leased {
			slot := p & uint64(len(win.ring)-1)
			m := &win.marks[slot/markPlaces]
			marked[slot/markPlaces] |= 1 << (slot % markPlaces)
			if m.delivery > e.delivery || m.until > e.at || c.Recorded() && c.lease > e.at {
				w.fatalf("%v: message %d has delivery %d until %v, its mark says %+v, the cursor %v", s.key, e.seq, e.delivery, e.at, m, c.lease)
			}
		}
	}
	for i, m := range win.marks {
		if m.leased != marked[i] {
			w.fatalf("%v: mark %d has %b, want %b", s.key, i, m.leased, marked[i])
		}
	}
	if counts[done] = 0; counts != c.counts || len(c.retry) > 2*int(c.counts[waiting])+int(c.counts[leased])+2*markPlaces {
		w.fatalf("%v: counts %v, found %v, %d in the heap", s.key, c.counts, counts, len(c.retry))
	}
	want := never
	if c.timer > 0 {
		want = w.book.timers[c.timer-1].wake
	}
	if c.wake != want {
		w.fatalf("%v: wake %v, in the heap %v", s.key, c.wake, want)
	}
}

func (w *world) run(steps int) {
	for w.step = range steps {
		s := w.subjects[w.rnd.IntN(len(w.subjects))]
		if w.rnd.IntN(4) == 0 {
			w.pass(time.Duration(w.rnd.Int64N(int64(second))))
		}
		switch k := w.rnd.IntN(1000); {
		case k < 150:
			s.o.last += Sequence(w.rnd.IntN(4))
			if s.c.Committed(s.o.last) {
				s.idle = false
			}
		case k < 450:
			w.deliver(s)
		case k < 640:
			w.settle(s)
		case k < 670:
			w.cumulative(s)
		case k < 760:
			w.propose()
		case k < 860:
			w.commit()
		case k < 920:
			w.tick(time.Duration(w.rnd.Int64N(int64(12 * second))))
		case k < 950:
			w.changeOwner(s)
		case k < 970:
			w.bury(s)
		case k < 976:
			w.lose(s)
		case k < 979:
			w.move(s)
		case k < 981:
			w.configure(s)
		case k < 986:
			w.snapshot()
		case k < 991:
			w.crash()
		default:
			w.tick(time.Duration(w.rnd.Int64N(int64(second))))
		}
		w.tick(0)
		w.check()
	}
	w.drain()
}

// drain is the liveness phase: with consumers that acknowledge everything, everything ends.
func (w *world) drain() {
	left := 0
	for _, s := range w.subjects {
		w.own(s)
		left += len(s.o.msgs) + int(s.o.last)
	}
	for range 20 * (left + 10) {
		w.step++
		left = 0
		for _, s := range w.subjects {
			w.deliver(s)
			for _, seq := range s.o.sorted(func(m *oracleMsg) bool { return m.status == sLeased }) {
				if m := s.o.msgs[seq]; s.c.Ack(seq, m.id, s.o.owner.Epoch, false, false, w.now) == Settling {
					s.o.to(m, sAcking)
				}
			}
			w.bury(s)
		}
		w.propose()
		w.commitAll()
		w.check()
		for _, s := range w.subjects {
			left += int(s.o.last - s.c.Floor())
		}
		if left == 0 {
			return
		}
		w.tick(second)
	}
	w.fatalf("%d messages are left at the end", left)
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
		newWorld(t, uint64(*modelFirst+seed)+1).run(*modelSteps)
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
