package crash

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/mortarmq/mortarmq/protocol"
)

// origin names a message independently of where the broker put it: the model's number of its producer and the how
// manyth of that producer in its partition it is, from 1.
type origin struct {
	producer uint64
	n        uint64
}

// plainBit marks the model's numbers of producers that publish without an identity on the wire.
const plainBit = uint64(1) << 63

// wire returns the producer_id and producer_seq that the message carries on the wire.
func (o origin) wire() (id, seq uint64) {
	if o.producer&plainBit != 0 {
		return 0, 0
	}
	return o.producer, o.n
}

// model is what a broker must remember. Everything is under mu; the parties of a round share it.
type model struct {
	seed  uint64
	mu    sync.Mutex
	parts []partModel
	errs  []error
}

// maxErrors bounds what a broken broker makes the model remember.
const maxErrors = 20

type partModel struct {
	producers map[uint64]*producerModel
	// at maps sequences to messages, from answers and from what was read.
	at map[uint64]origin
	// end is the sequence up to which the log is known to reach.
	end uint64
	// acked are the sequences whose ACK was answered; maybe those whose ACK was sent but not answered before the end of
	// the connection; now those that were delivered since the last start.
	acked, maybe, now map[uint64]struct{}
	// nacks counts the NACKs of a sequence: each that was answered is a failed attempt, one that was not may be.
	nacks map[uint64]nackCount
}

type nackCount struct{ sent, answered int }

// producerModel is one producer in one partition.
type producerModel struct {
	// sequence[n-1] is where message n was acknowledged, 0 for one that was sent but not answered.
	sequence []uint64
	// answered is the number of leading messages that are all answered: the retry starts behind them.
	answered int
}

func newModel(seed uint64, partitions int) *model {
	m := &model{seed: seed, parts: make([]partModel, partitions)}
	for i := range m.parts {
		m.parts[i] = partModel{producers: map[uint64]*producerModel{}, at: map[uint64]origin{},
			acked: map[uint64]struct{}{}, maybe: map[uint64]struct{}{}, now: map[uint64]struct{}{},
			nacks: map[uint64]nackCount{}}
	}
	return m
}

// fail remembers a broken promise. The caller holds mu.
func (m *model) fail(format string, args ...any) {
	if len(m.errs) < maxErrors {
		m.errs = append(m.errs, fmt.Errorf(format, args...))
	}
}

// err returns the promises broken so far.
func (m *model) err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return errors.Join(m.errs...)
}

// A message's key and value follow from the seed, its partition and its origin, so that what is read can be checked
// without being remembered. The value begins with what is needed to know them:
//
//	magic u32 | seed u64 | partition u16 | producer u64 | n u64 | random bytes
const (
	valueMagic  = 0x4d4d4352
	valueHeader = 4 + 8 + 2 + 8 + 8
)

// content returns key and value of a message.
func (m *model) content(part uint16, o origin) (key, value []byte) {
	rng := rand.New(rand.NewPCG(m.seed^o.producer*0x9e3779b97f4a7c15, uint64(part)<<48^o.n))
	var n int
	switch r := rng.IntN(1000); {
	case r == 0:
		n = 200<<10 + rng.IntN(200<<10) // spans many blocks
	case r < 20:
		n = 16<<10 + rng.IntN(32<<10)
	case r < 500:
		n = rng.IntN(100)
	default:
		n = rng.IntN(1500)
	}
	value = make([]byte, valueHeader, valueHeader+n+8)
	binary.BigEndian.PutUint32(value, valueMagic)
	binary.BigEndian.PutUint64(value[4:], m.seed)
	binary.BigEndian.PutUint16(value[12:], part)
	binary.BigEndian.PutUint64(value[14:], o.producer)
	binary.BigEndian.PutUint64(value[22:], o.n)
	for len(value) < valueHeader+n {
		value = binary.LittleEndian.AppendUint64(value, rng.Uint64())
	}
	value = value[:valueHeader+n]
	if rng.IntN(2) == 0 {
		key = fmt.Appendf(nil, "key-%d", rng.IntN(1000))
	}
	return key, value
}

// send notes that a producer's next message in a partition is about to be sent.
func (m *model) send(producer uint64, part uint16) origin {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.producer(producer, part)
	p.sequence = append(p.sequence, 0)
	return origin{producer, uint64(len(p.sequence))}
}

// producer returns the state of a producer in a partition. The caller holds mu.
func (m *model) producer(producer uint64, part uint16) *producerModel {
	p := m.parts[part].producers[producer]
	if p == nil {
		p = &producerModel{}
		m.parts[part].producers[producer] = p
	}
	return p
}

// unanswered returns a producer's messages in a partition that must be sent again, oldest first, preceded by up to extra
// of those that were answered last.
func (m *model) unanswered(producer uint64, part uint16, extra int) []origin {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.producer(producer, part)
	var list []origin
	for n := max(0, p.answered-extra); n < len(p.sequence); n++ {
		list = append(list, origin{producer, uint64(n) + 1})
	}
	return list
}

// acknowledged notes the answer to a PUB.
func (m *model) acknowledged(part uint16, o origin, res *protocol.PubResult) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.producer(o.producer, part)
	was := p.sequence[o.n-1]
	dedup := res.Flags&protocol.ResultFlagDeduplicated != 0
	switch {
	case was != 0 && res.Sequence != was:
		m.fail("partition %d: the retry of producer %#x's message %d was answered with sequence %d, the first time it was %d", part, o.producer, o.n, res.Sequence, was)
	case was != 0 && !dedup:
		m.fail("partition %d: the retry of producer %#x's message %d, stored at %d, was not answered as deduplicated", part, o.producer, o.n, was)
	}
	p.sequence[o.n-1] = res.Sequence
	for p.answered < len(p.sequence) && p.sequence[p.answered] != 0 {
		p.answered++
	}
	m.place(part, res.Sequence, o, "acknowledged")
	if res.Sequence > m.parts[part].end {
		m.parts[part].end = res.Sequence
	}
}

// place notes that a message is at a sequence. The caller holds mu.
func (m *model) place(part uint16, seq uint64, o origin, how string) {
	if seq == 0 {
		m.fail("partition %d: producer %#x's message %d was %s at sequence 0", part, o.producer, o.n, how)
		return
	}
	if was, ok := m.parts[part].at[seq]; ok && was != o {
		m.fail("partition %d: sequence %d was %s as producer %#x's message %d, before it was producer %#x's message %d",
			part, seq, how, o.producer, o.n, was.producer, was.n)
	}
	m.parts[part].at[seq] = o
}

// check compares a message that was read with what was sent. The caller holds mu.
func (m *model) check(msg *protocol.Msg) (origin, bool) {
	where := fmt.Sprintf("partition %d, sequence %d", msg.Partition, msg.Sequence)
	v := msg.Value
	if int(msg.Partition) >= len(m.parts) {
		m.fail("%s: there is no such partition", where)
		return origin{}, false
	}
	if len(v) < valueHeader || binary.BigEndian.Uint32(v) != valueMagic || binary.BigEndian.Uint64(v[4:]) != m.seed ||
		binary.BigEndian.Uint16(v[12:]) != msg.Partition {
		m.fail("%s: a value of %d bytes that was never sent there: %.40x", where, len(v), v)
		return origin{}, false
	}
	o := origin{binary.BigEndian.Uint64(v[14:]), binary.BigEndian.Uint64(v[22:])}
	p := m.parts[msg.Partition].producers[o.producer]
	if p == nil || o.n == 0 || o.n > uint64(len(p.sequence)) {
		m.fail("%s: producer %#x's message %d was never sent", where, o.producer, o.n)
		return origin{}, false
	}
	key, value := m.content(msg.Partition, o)
	id, seq := o.wire()
	if !bytes.Equal(key, msg.Key) || !bytes.Equal(value, v) || msg.ProducerID != id || msg.ProducerSeq != seq {
		m.fail("%s: producer %#x's message %d is not as it was sent: key %q for %q, %d bytes of value for %d, producer %d/%d for %d/%d",
			where, o.producer, o.n, msg.Key, key, len(v), len(value), msg.ProducerID, msg.ProducerSeq, id, seq)
		return origin{}, false
	}
	if at := p.sequence[o.n-1]; at != 0 && at != msg.Sequence {
		m.fail("%s: producer %#x's message %d was acknowledged at sequence %d", where, o.producer, o.n, at)
		return origin{}, false
	}
	m.place(msg.Partition, msg.Sequence, o, "read")
	return o, true
}

// delivered checks a delivery to the group.
func (m *model) delivered(msg *protocol.Msg) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.check(msg); !ok {
		return
	}
	p := &m.parts[msg.Partition]
	if _, done := p.acked[msg.Sequence]; done {
		m.fail("partition %d: sequence %d was delivered after its ACK had been answered", msg.Partition, msg.Sequence)
	}
	if _, twice := p.now[msg.Sequence]; twice {
		m.fail("partition %d: sequence %d was delivered twice without a restart, a NACK or an expired lease", msg.Partition, msg.Sequence)
	}
	if n := p.nacks[msg.Sequence]; int(msg.Attempt) < 1+n.answered || int(msg.Attempt) > 1+n.sent {
		m.fail("partition %d: sequence %d was delivered as attempt %d after %d NACKs of which %d were answered; nothing else uses up an attempt, no restart either",
			msg.Partition, msg.Sequence, msg.Attempt, n.sent, n.answered)
	}
	p.now[msg.Sequence] = struct{}{}
}

// ackSent and ackAnswered note the two ends of an ACK.
func (m *model) ackSent(part uint16, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.parts[part].maybe[seq] = struct{}{}
}

func (m *model) ackAnswered(part uint16, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.parts[part].maybe, seq)
	m.parts[part].acked[seq] = struct{}{}
}

// nackSent and nackAnswered note the two ends of a NACK, after which the message comes again.
func (m *model) nackSent(part uint16, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := &m.parts[part]
	n := p.nacks[seq]
	n.sent++
	p.nacks[seq] = n
	delete(p.now, seq)
}

func (m *model) nackAnswered(part uint16, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.parts[part].nacks[seq]
	n.answered++
	m.parts[part].nacks[seq] = n
}

// restarted forgets what the group has seen since the last start.
func (m *model) restarted() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.parts {
		clear(m.parts[i].now)
	}
}

// pending returns, per partition, the sequences up to the known end that the group's consumer still has to see since the
// last start: those neither acknowledged nor delivered.
func (m *model) pending() map[uint16][]uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := map[uint16][]uint64{}
	for i := range m.parts {
		p := &m.parts[i]
		for seq := uint64(1); seq <= p.end; seq++ {
			if has(p.acked, seq) || has(p.maybe, seq) || has(p.now, seq) {
				continue
			}
			list[uint16(i)] = append(list[uint16(i)], seq)
		}
	}
	return list
}

func has(set map[uint64]struct{}, seq uint64) bool {
	_, ok := set[seq]
	return ok
}

// ends returns the known end of every partition.
func (m *model) ends() []uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	ends := make([]uint64, len(m.parts))
	for i := range m.parts {
		ends[i] = m.parts[i].end
	}
	return ends
}

// logCheck compares a whole log, read from its start, with the model.
type logCheck struct {
	m    *model
	next []uint64
	seen []map[origin]uint64
}

func (m *model) newLogCheck() *logCheck {
	c := &logCheck{m: m, next: make([]uint64, len(m.parts)), seen: make([]map[origin]uint64, len(m.parts))}
	for i := range c.next {
		c.next[i], c.seen[i] = 1, map[origin]uint64{}
	}
	return c
}

// message checks the next message of a partition.
func (c *logCheck) message(msg *protocol.Msg) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	o, ok := c.m.check(msg)
	if !ok {
		return
	}
	p := msg.Partition
	if msg.Sequence != c.next[p] {
		c.m.fail("partition %d: sequence %d follows %d", p, msg.Sequence, c.next[p]-1)
	}
	c.next[p] = msg.Sequence + 1
	if first, twice := c.seen[p][o]; twice {
		c.m.fail("partition %d: producer %#x's message %d is stored twice, at %d and %d", p, o.producer, o.n, first, msg.Sequence)
	}
	c.seen[p][o] = msg.Sequence
}

// finish checks that everything acknowledged was there, and returns how many messages were read.
func (c *logCheck) finish() (read int) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	for i := range c.m.parts {
		read += len(c.seen[i])
		producers := c.m.parts[i].producers
		for _, id := range sortedProducers(producers) {
			for n, at := range producers[id].sequence {
				if o := (origin{id, uint64(n) + 1}); at != 0 && c.seen[i][o] == 0 {
					c.m.fail("partition %d: producer %#x's message %d, acknowledged at sequence %d, is lost", i, id, o.n, at)
				}
			}
		}
	}
	return read
}

func sortedProducers(m map[uint64]*producerModel) []uint64 {
	ids := make([]uint64, 0, len(m))
	for id := range m {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}
