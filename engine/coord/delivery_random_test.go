package coord

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

// deliveryRun is a seeded run of publishers, consumers, disk, and failures around one delivery.
type deliveryRun struct {
	*rig
	seed    uint64
	step    int
	rnd     *rand.Rand
	clients []*runClient
	acked   map[[2]uint64]bool // by partition and sequence: the ACK was answered with OK
	attempt map[[2]uint64]uint16
}

type runClient struct {
	*fakeClient
	sub     *subscription
	got     []protocol.Msg
	pending map[uint64]protocol.Msg // ACKs that are not answered
	used    uint32                  // credit
}

func (w *deliveryRun) connect() {
	stream := w.rnd.IntN(2) == 0
	for len(w.clients) > 0 {
		w.disconnect(w.rnd.IntN(2) == 0)
	}
	cl, s := w.subscribe(rigGroup, stream, func(s *subscription) {
		s.windowCount, s.windowBytes = uint32(1+w.rnd.IntN(40)), uint64(500+w.rnd.IntN(50_000))
	})
	w.clients = append(w.clients, &runClient{fakeClient: cl, sub: s, pending: map[uint64]protocol.Msg{}})
}

func (w *deliveryRun) disconnect(graceful bool) {
	c := w.clients[0]
	c.sub.ended = protocol.CodeUnknownMember
	w.d.closeSub(c.sub, graceful)
	c.unstick()
	delete(w.c.sessions, c.id)
	w.c.lastSession = nil
	w.clients = w.clients[:0]
	w.turn()
	w.settle(c)
}

// settle looks at what has come.
func (w *deliveryRun) settle(c *runClient) {
	for _, m := range c.take() {
		k := [2]uint64{uint64(m.Partition), m.Sequence}
		if w.acked[k] {
			w.t.Fatalf("seed %d step %d: partition %d sequence %d was acknowledged and is delivered again", w.seed, w.step, m.Partition, m.Sequence)
		}
		if m.Attempt < w.attempt[k] {
			w.t.Fatalf("seed %d step %d: attempt %d after %d", w.seed, w.step, m.Attempt, w.attempt[k])
		}
		if int(m.Sequence) > len(w.store.records[m.Partition]) || len(m.Value) != len(w.store.records[m.Partition][m.Sequence-1].Value) {
			w.t.Fatalf("seed %d step %d: partition %d sequence %d is not what was published", w.seed, w.step, m.Partition, m.Sequence)
		}
		w.attempt[k] = m.Attempt
		c.got = append(c.got, m)
		c.used++
	}
	for req, m := range c.pending {
		switch err := c.answer(req); {
		case err == nil:
			w.acked[[2]uint64{uint64(m.Partition), m.Sequence}] = true
			delete(c.pending, req)
		case c.answers[req] != nil:
			delete(c.pending, req)
		}
	}
	if con := c.sub.consumer; con.credit.count > con.credit.windowCount || con.credit.bytes > con.credit.windowBytes {
		w.t.Fatalf("seed %d step %d: credit %+v", w.seed, w.step, con.credit)
	}
}

func (w *deliveryRun) act(c *runClient) {
	if len(c.got) > 0 && w.rnd.IntN(3) > 0 {
		i := w.rnd.IntN(len(c.got))
		m := c.got[i]
		c.got = append(c.got[:i], c.got[i+1:]...)
		if w.rnd.IntN(8) == 0 {
			c.nack(&m, protocol.NackReason(w.rnd.IntN(2)))
		} else {
			c.pending[c.ack(&m, 0)] = m
		}
		return
	}
	switch w.rnd.IntN(5) {
	case 0:
		c.credit(c.sub, protocol.CreditAdd, uint16(c.used), 50_000)
		c.used = 0
	case 1:
		c.credit(c.sub, protocol.CreditSet, uint16(1+w.rnd.IntN(60)), uint32(30_000+w.rnd.IntN(30_000)))
		c.used = 0
	case 2:
		c.stuck = true
	case 3:
		c.unstick()
	default:
		c.fakeClient.pull(c.sub, func(p *protocol.Pull) {
			p.WaitMs, p.MaxMsgs, p.MinBytes = uint16(w.rnd.IntN(1000)), uint16(w.rnd.IntN(20)), uint32(w.rnd.IntN(2000))
		})
	}
}

func (w *deliveryRun) run(steps int) {
	w.connect()
	for w.step = range steps {
		switch k := w.rnd.IntN(100); {
		case k < 20:
			size := w.rnd.IntN(300)
			if w.rnd.IntN(10) == 0 {
				size = ZeroCopyMin + w.rnd.IntN(5000)
			}
			w.publish(uint16(w.rnd.IntN(3)), make([]byte, size))
		case k < 30:
			w.d.written(0, w.journal.number)
		case k < 40:
			w.round()
			w.turn()
		case k < 50:
			w.reads()
		case k < 54:
			w.pass(time.Duration(w.rnd.IntN(9000)) * time.Millisecond)
		case k < 55:
			w.connect()
		case k < 56:
			w.crash()
		case k < 58:
			w.d.checkpoint(w.d.ledgers[0])
		case k < 60:
			w.d.interrupt(w.clients[0].fakeClient)
			w.turn()
		default:
			w.act(w.clients[0])
			w.turn()
		}
		w.settle(w.clients[0])
	}
	w.drain()
}

// crash is kill -9: what was proposed is lost.
func (w *deliveryRun) crash() {
	c := w.clients[0]
	w.settle(c)
	for _, o := range c.owned {
		o.Release()
	}
	c.owned = nil
	w.d.close() // for its memory only
	w.store.reads = nil
	if w.rnd.IntN(2) == 0 {
		w.store.snapshots = nil // recovery from the records alone must come to the same
	}
	w.restart()
	w.clients = nil
	w.connect()
}

// drain is the liveness phase: a good consumer gets everything that is left.
func (w *deliveryRun) drain() {
	w.connect()
	c := w.clients[0]
	c.sub.stream = true
	for range 300 {
		w.step++
		c.credit(c.sub, protocol.CreditSet, 65535, maxCreditBytes)
		w.turn()
		w.reads()
		w.settle(c)
		for i := range c.got {
			c.pending[c.ack(&c.got[i], 0)] = c.got[i]
		}
		c.got = c.got[:0]
		w.turn()
		w.commit()
		w.settle(c)
		left := 0
		for p, records := range w.store.records {
			left += len(records) - int(w.d.groups[rigGroup].sets[0].readers[p].cur.Floor())
		}
		if left == 0 {
			return
		}
		w.pass(time.Second)
	}
	w.t.Fatalf("seed %d: messages are left", w.seed)
}

func TestDelivery_RandomTrafficLosesNothingAndRepeatsNothingAcknowledged(t *testing.T) {
	for seed := range uint64(150) {
		r := newRig(t, 3, func(o *Options) { o.TailBytes = 16 << 10; o.DeliveryMaxAttempts = 1000; o.Seed = seed + 1 })
		w := &deliveryRun{rig: r, seed: seed, rnd: rand.New(rand.NewPCG(seed, 3)), acked: map[[2]uint64]bool{}, attempt: map[[2]uint64]uint16{}}
		w.run(600)
		for len(w.clients) > 0 {
			w.disconnect(true)
		}
		w.d.close()
		w.reads()
		if n := r.pool.InUse(); n != 0 {
			t.Fatalf("seed %d: %d bytes are still in use", seed, n)
		}
	}
}
