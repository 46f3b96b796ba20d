package coord

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/protocol"
)

var (
	letterSeeds = flag.Int("letters.seeds", 1000, "number of seeds of the random test of ledger and dead letters")
	letterSteps = flag.Int("letters.steps", 1000, "steps per seed")
	letterFirst = flag.Int("letters.first", 0, "seeds to leave out before the first one")
	letterSeed  = flag.Uint64("letters.seed", 0, "run this seed only")
)

// messageName is a message by partition and sequence.
type messageName struct {
	partition uint16
	seq       uint64
}

// letterRun is a seeded life of a group with poison messages: refusals, expired leases, lost connections, a dead-letter
// topic that can't be written or created for a while, a disk that can't be read, journals that commit apart from each
// other, and crashes at any moment. What must hold is looked at after each step.
type letterRun struct {
	*rig
	seed uint64
	step int
	rnd  *rand.Rand
	max  int // attempts, 0: no maximum

	cl      *fakeClient
	sub     *subscription
	got     []protocol.Msg
	pending map[uint64]messageName // ACKs without an answer
	rejects map[uint64]messageName // rejections without an answer
	down    map[uint64]messageName // rejections that were answered with 0x0031

	acked    map[messageName]bool // an ACK was answered with OK
	lettered map[messageName]int
	counted  int // letters in lettered
	attempts map[messageName]uint16
	floors   [2]uint64
	trace    uint64
}

func (w *letterRun) fatalf(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d step %d: %s (reproduce with -letters.seed=%d)", w.seed, w.step, fmt.Sprintf(format, args...), w.seed)
}

func (w *letterRun) note(v ...uint64) {
	for _, x := range v {
		w.trace = (w.trace ^ x) * 0x100000001b3
	}
}

func newLetterRun(t *testing.T, seed uint64) *letterRun {
	w := &letterRun{seed: seed, rnd: rand.New(rand.NewPCG(seed, 11)), acked: map[messageName]bool{}, lettered: map[messageName]int{},
		attempts: map[messageName]uint16{}, down: map[uint64]messageName{}}
	set := metadata.GroupSettings{MaxAttempts: uint16(1 + w.rnd.IntN(4)), Ordered: w.rnd.IntN(4) == 0}
	if w.rnd.IntN(4) == 0 {
		set.Retry, set.Delays = metadata.RetryList, []time.Duration{100 * time.Millisecond, 3 * time.Second}
	}
	if set.Ordered && w.rnd.IntN(2) == 0 {
		set.MaxAttempts = 0
	}
	w.rig = newRig(t, 2, func(o *Options) {
		o.TailBytes, o.Seed, o.DeliveryLease = int64(w.rnd.IntN(2)*8<<10+1), seed+1, 5*time.Second
	})
	w.meta.Group(rigGroup).Settings = set
	w.d.groupConfigured(rigGroup)
	w.max = set.Attempts(5)
	w.connect()
	return w
}

func (w *letterRun) connect() {
	w.cl, w.sub = w.subscribe(rigGroup, true, func(s *subscription) { s.windowCount, s.windowBytes = 65535, maxCreditBytes })
	w.got, w.pending, w.rejects = nil, map[uint64]messageName{}, map[uint64]messageName{}
}

func (w *letterRun) disconnect(graceful bool) {
	w.look()
	w.sub.ended = protocol.CodeUnknownMember
	w.d.closeSub(w.sub, graceful)
	delete(w.c.sessions, w.cl.id)
	w.c.lastSession = nil
	w.turn()
	w.look()
}

func (w *letterRun) crash() {
	w.look()
	w.d.close() // for its memory only
	w.store.reads = nil
	if w.rnd.IntN(2) == 0 {
		w.store.snapshots = nil
	}
	w.down = map[uint64]messageName{} // the requests are numbered anew
	w.restart()
	w.connect()
}

// commitSome commits what is proposed, or only what is for the ledger, or only the letters: they may be in two journals.
func (w *letterRun) commitSome() {
	j := w.journal
	letters, proposals := j.letters, j.proposals
	switch w.rnd.IntN(3) {
	case 0:
		j.letters = nil
		w.round()
		j.letters = append(letters, j.letters...)
	case 1:
		j.proposals = nil
		w.round()
		j.proposals = append(proposals, j.proposals...)
	default:
		w.round()
	}
	w.refusals()
	w.turn()
}

func (w *letterRun) refusals() {
	refused := w.journal.refused
	w.journal.refused = nil
	for _, id := range refused {
		w.d.refused(id, "refused by the test")
	}
}

// act ends a random delivery in some way.
func (w *letterRun) act() {
	if len(w.got) == 0 {
		return
	}
	i := w.rnd.IntN(len(w.got))
	m := w.got[i]
	w.got = append(w.got[:i], w.got[i+1:]...)
	name := messageName{m.Partition, m.Sequence}
	switch k := w.rnd.IntN(10); {
	case k < 4:
		w.pending[w.cl.ack(&m, 0)] = name
	case k < 6:
		w.rejects[w.cl.nack(&m, protocol.NackReject)] = name
	case k < 8:
		w.cl.nack(&m, protocol.NackRetryLater)
	case k < 9:
		w.cl.nack(&m, protocol.NackRetryNow)
	default: // forgotten: its lease runs out
	}
}

// look takes what has come and checks it.
func (w *letterRun) look() {
	w.letters()
	for _, m := range w.cl.take() {
		name := messageName{m.Partition, m.Sequence}
		w.note(uint64(m.Partition), m.Sequence, uint64(m.Attempt))
		switch {
		case w.acked[name]:
			w.fatalf("%v was acknowledged and is delivered again", name)
		case w.max > 0 && int(m.Attempt) > w.max:
			w.fatalf("%v: attempt %d of %d", name, m.Attempt, w.max)
		case m.Attempt < w.attempts[name]:
			w.fatalf("%v: attempt %d after %d", name, m.Attempt, w.attempts[name])
		}
		w.attempts[name] = m.Attempt
		w.got = append(w.got, m)
	}
	for req, name := range w.pending {
		if w.cl.answers[req] == nil {
			continue
		}
		if w.cl.answer(req) == nil {
			w.acked[name] = true
		}
		delete(w.pending, req)
	}
	for req, name := range w.rejects {
		if w.cl.answers[req] == nil {
			continue
		}
		switch err := w.cl.answer(req); {
		case err == nil && w.lettered[name] != 1:
			w.fatalf("the rejection of %v was answered with OK, it has %d letters", name, w.lettered[name])
		case errors.Is(err, protocol.CodeDLQUnavailable):
			w.down[req] = name
		}
		delete(w.rejects, req)
	}
	w.sums()
}

// letters counts the letters that are stored.
func (w *letterRun) letters() {
	for _, stored := range w.store.letters {
		for ; w.counted < len(stored); w.counted++ {
			var e deadletter.Envelope
			value, err := e.Decode(stored[w.counted].Value)
			if err != nil {
				w.fatalf("%v", err)
			}
			name := messageName{e.Partition, e.Sequence}
			w.note(e.Sequence, uint64(e.Attempts))
			if w.lettered[name]++; w.lettered[name] > 1 {
				w.fatalf("%v has two letters", name)
			}
			if w.acked[name] {
				w.fatalf("%v was acknowledged and has a letter", name)
			}
			if string(value) != string(w.store.records[e.Partition][e.Sequence-1].Value) {
				w.fatalf("the letter of %v is not the message", name)
			}
			if e.Reason != deadletter.ReasonRejected && int(e.Attempts) != w.max {
				w.fatalf("%v has a letter after %d attempts of %d", name, e.Attempts, w.max)
			}
		}
	}
}

func (w *letterRun) sums() {
	g := w.stats()
	if g.Published != g.Acknowledged+g.Dropped+g.InFlight+g.Waiting || g.DLQ > g.Dropped || int(g.Dropped) > w.counted {
		w.fatalf("%+v with %d letters", g, w.counted)
	}
	for i, rd := range w.d.groups[rigGroup].sets[0].readers {
		floor := uint64(rd.cur.Floor())
		if floor < w.floors[i] {
			w.fatalf("the floor of partition %d went from %d back to %d", i, w.floors[i], floor)
		}
		w.floors[i] = floor
	}
	if n := w.d.office.active; n < 0 || n > maxActiveLetters {
		w.fatalf("%d letters under way", n)
	}
}

func (w *letterRun) run(steps int) {
	for w.step = range steps {
		switch k := w.rnd.IntN(100); {
		case k < 12:
			w.publish(uint16(w.rnd.IntN(2)), []byte(fmt.Sprint(w.seed, w.step)))
		case k < 15:
			w.d.written(0, w.journal.number)
		case k < 40:
			w.commitSome()
		case k < 46:
			w.reads()
		case k < 54:
			w.pass(time.Duration(w.rnd.IntN(3000)) * time.Millisecond)
		case k < 55:
			w.disconnect(w.rnd.IntN(2) == 0)
			w.connect()
		case k < 57:
			w.crash()
		case k < 58:
			w.d.checkpoint(w.d.ledgers[0])
		case k < 60:
			w.trouble(w.rnd.IntN(6))
		default:
			w.act()
			w.turn()
		}
		w.look()
	}
	w.drain()
}

// trouble begins or ends one of the troubles; both are as likely.
func (w *letterRun) trouble(k int) {
	switch k {
	case 0:
		w.journal.refuse = "no space"
	case 1:
		w.noTopics = protocol.CodeMetadataReadOnly
	case 2:
		w.store.err = errors.New("bad sector")
	default:
		w.journal.refuse, w.noTopics, w.store.err = "", nil, nil
	}
}

// drain is the liveness phase: all troubles end and the consumer acknowledges everything.
func (w *letterRun) drain() {
	w.trouble(5)
	// An ordered group is served one message at a time.
	for range 400 + 2*(len(w.store.records[0])+len(w.store.records[1])) {
		w.step++
		for i := range w.got {
			m := &w.got[i]
			w.pending[w.cl.ack(m, 0)] = messageName{m.Partition, m.Sequence}
		}
		w.got = w.got[:0]
		w.turn()
		w.reads()
		w.commit()
		w.look()
		if g := w.stats(); g.Lag == 0 && g.Waiting == 0 && g.InFlight == 0 {
			w.finished()
			return
		}
		w.pass(time.Second)
	}
	w.fatalf("not at the end: %+v, office %+v", w.stats(), w.d.office)
}

// finished checks the end: each message is either acknowledged or in a letter.
func (w *letterRun) finished() {
	total := 0
	for _, records := range w.store.records {
		total += len(records)
	}
	g := w.stats()
	if int(g.Published) != total || int(g.Dropped) != w.counted || g.DLQ != g.Dropped || int(g.Acknowledged) != total-w.counted {
		w.fatalf("at the end %+v of %d messages with %d letters", g, total, w.counted)
	}
	for req, name := range w.down {
		if w.lettered[name] != 1 {
			w.fatalf("the rejection %d of %v was answered with 0x0031, and it has %d letters in the end", req, name, w.lettered[name])
		}
	}
	if o := &w.d.office; o.open+len(o.written)+o.active+len(o.stuck) != 0 || o.bytes != 0 {
		w.fatalf("something is left: %+v", o)
	}
	w.disconnect(true)
	w.d.close()
	w.reads()
	if n := w.pool.InUse(); n != 0 {
		w.fatalf("%d bytes are still in use", n)
	}
}

func TestLetters_RandomLivesEndWithEachMessageAcknowledgedOrInOneLetter(t *testing.T) {
	if *letterSeed != 0 {
		newLetterRun(t, *letterSeed).run(*letterSteps)
		return
	}
	n := *letterSeeds
	if testing.Short() {
		n /= 20
	}
	for seed := range n {
		newLetterRun(t, uint64(*letterFirst+seed)+1).run(*letterSteps)
	}
}

func TestLetters_RandomLivesReproduceBitForBit(t *testing.T) {
	a, b := newLetterRun(t, 42), newLetterRun(t, 42)
	a.run(1500)
	b.run(1500)
	if a.trace != b.trace {
		t.Fatal("two runs of one seed differ")
	}
}
