package coord

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// radio drives a broadcast group through random lives: members that join, leave, lose their connections, come back in time
// or too late, acknowledge, refuse or forget what they hear, and a broker that dies with part of that on record. Each member
// has to hear every message from where it began, none twice that it was told is done, and each as its first attempt.
type radio struct {
	*airwave
	rnd       *rand.Rand
	step      int
	listeners []*fan
}

// fan is a member as the test knows it.
type fan struct {
	c      *stubClient
	member uint64
	sub    uint16
	on     bool // connected
	gone   bool // it left, or was told that it is no member any more
	floor  [2]uint64
	heard  [2]map[uint64]bool
	over   [2]map[uint64]bool // answered as acknowledged or given up
	asked  map[uint64]protocol.Msg
}

func (r *radio) fail(format string, args ...any) {
	r.t.Helper()
	r.t.Fatalf("step %d: %s", r.step, fmt.Sprintf(format, args...))
}

// join makes a new member, or has one come back.
func (r *radio) join(f *fan) {
	policy := protocol.StartPolicy(r.rnd.IntN(2))
	member := uint64(0)
	if f != nil {
		member = f.member
	}
	c := r.client()
	answer := r.do(c, broadcastSub("all", policy, member))
	if strings.HasPrefix(answer, "ERR 0x0026") && f != nil {
		f.gone = true
		return
	}
	if strings.HasPrefix(answer, "ERR 0x0024") && f == nil {
		return // enough of them are connected
	}
	if f == nil {
		f = &fan{asked: map[uint64]protocol.Msg{}}
		for p := range 2 {
			f.heard[p], f.over[p] = map[uint64]bool{}, map[uint64]bool{}
			if policy == protocol.StartLatest {
				f.floor[p] = uint64(len(r.stored[p]))
			}
		}
		r.listeners = append(r.listeners, f)
	}
	f.c, f.on = c, true
	if _, err := fmt.Sscanf(answer, "OK SUB sub=%d member=%x", &f.sub, &f.member); err != nil || member != 0 && f.member != member {
		r.fail("SUB of %x: %s", member, answer)
	}
}

// listen takes what came to a member, and confirms its notices.
func (r *radio) listen(f *fan) {
	if !f.on {
		return
	}
	r.settle(f)
	r.confirm(f.c)
	msgs := f.c.msgs
	f.c.msgs = nil
	for _, m := range msgs {
		p := m.Partition
		switch {
		case m.Attempt != 1:
			r.fail("%x gets message %d of partition %d as attempt %d", f.member, m.Sequence, p, m.Attempt)
		case m.Sequence <= f.floor[p]:
			r.fail("%x gets message %d of partition %d, but began behind %d", f.member, m.Sequence, p, f.floor[p])
		case f.over[p][m.Sequence]:
			r.fail("%x gets message %d of partition %d again", f.member, m.Sequence, p)
		}
		f.heard[p][m.Sequence] = true
		switch k := r.rnd.IntN(10); {
		case k < 6:
			f.asked[r.bench.send(f.c, acked(&m))] = m
		case k < 8:
			f.asked[r.bench.send(f.c, nacked(protocol.NackReason(r.rnd.IntN(3)))(&m))] = m
		}
	}
	r.credit(f)
}

func (r *radio) credit(f *fan) {
	r.bench.send(f.c, (&protocol.Credit{SubscriptionID: f.sub, MembershipEpoch: 1 << 30, Mode: protocol.CreditSet, Count: 1000, Bytes: 1 << 20}).AppendFrame(nil))
}

// settle takes the answers to ACKs and NACKs.
func (r *radio) settle(f *fan) {
	for req, m := range f.asked {
		switch answer, ok := f.c.answers[req]; {
		case !ok:
			continue
		case strings.HasPrefix(answer, "OK"):
			f.over[m.Partition][m.Sequence] = true
		case !strings.HasPrefix(answer, "ERR 0x0023") && !strings.HasPrefix(answer, "ERR 0x0022"):
			r.fail("%x asked about message %d: %s", f.member, m.Sequence, answer)
		}
		delete(f.asked, req)
	}
}

func (r *radio) pick(ok func(*fan) bool) *fan {
	var all []*fan
	for _, f := range r.listeners {
		if !f.gone && ok(f) {
			all = append(all, f)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all[r.rnd.IntN(len(all))]
}

func (r *radio) turnOff(f *fan) {
	r.settle(f)
	f.on = false
	clear(f.asked)
}

func (r *radio) beat() {
	for _, f := range r.listeners {
		if f.on {
			r.bench.send(f.c, heartbeat(f.sub, f.member, 1<<30, 0, protocol.MemberActive))
		}
	}
}

// run takes random steps, then has everybody who is still there hear everything.
func (r *radio) run(steps int) {
	on := func(f *fan) bool { return f.on }
	for r.step = range steps {
		switch k := r.rnd.IntN(100); {
		case k < 30:
			r.publishTo(uint16(r.rnd.IntN(2)), 1+r.rnd.IntN(3))
		case k < 60:
			if f := r.pick(on); f != nil {
				r.listen(f)
			}
		case k < 75:
			r.commit()
		case k < 80:
			if len(r.listeners) < 12 {
				r.join(nil)
			}
		case k < 85:
			if f := r.pick(on); f != nil {
				r.turnOff(f)
				r.closeClient(f.c)
			}
		case k < 92:
			if f := r.pick(func(f *fan) bool { return !f.on }); f != nil {
				r.join(f)
			}
		case k < 94:
			if f := r.pick(on); f != nil {
				f.gone, f.on = true, false
				r.do(f.c, heartbeat(f.sub, f.member, 1<<30, 0, protocol.MemberLeave))
			}
		case k < 96:
			for _, f := range r.listeners {
				r.turnOff(f)
			}
			r.restart()
		default:
			r.beat()
			r.advance(time.Duration(r.rnd.IntN(1500)) * time.Millisecond)
		}
	}
	r.end()
}

func (r *radio) end() {
	for _, f := range r.listeners {
		if !f.gone && !f.on {
			r.join(f)
		}
	}
	for range 60 {
		r.beat()
		for _, f := range r.listeners {
			if f.on {
				r.listen(f)
			}
		}
		r.commit()
		r.advance(time.Second)
	}
	members := 0
	for _, f := range r.listeners {
		if !f.on {
			continue
		}
		members++
		for p := range 2 {
			for seq := f.floor[p] + 1; seq <= uint64(len(r.stored[p])); seq++ {
				if !f.heard[p][seq] {
					r.fail("%x never heard message %d of partition %d", f.member, seq, p)
				}
			}
		}
	}
	d := r.c.delivery.(*delivery)
	if n := len(d.ledgers[0].book.Cursors()); n != 2*members || r.c.groups.changes.assignments != 0 || len(r.c.groups.arrivals) != 0 {
		r.fail("%d cursors for %d members, %d reserved", n, members, r.c.groups.changes.assignments)
	}
	for _, g := range r.c.statistics().Groups {
		if g.Published != g.Acknowledged+g.Dropped+g.InFlight+g.Waiting || g.DLQ != 0 || g.Waiting != 0 || g.InFlight != 0 {
			r.fail("stats %+v", g)
		}
	}
}

func TestBroadcast_RandomLivesHearEverythingOnce(t *testing.T) {
	seeds := 300
	if testing.Short() {
		seeds = 30
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed_", seed), func(t *testing.T) {
			r := &radio{airwave: newAirwave(t), rnd: rand.New(rand.NewPCG(uint64(seed), 11))}
			r.run(200)
			if live := r.c.statistics().Groups; len(live) > 0 && slices.ContainsFunc(live[0].Members, func(m MemberStats) bool { return m.Lag != 0 }) {
				t.Errorf("members are behind: %+v", live[0].Members)
			}
		})
	}
}
