package engine

import (
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
	"github.com/mortarmq/mortarmq/engine/mpsc"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/wal"
)

// messageKind says what a message in a shard's inbox asks for.
type messageKind uint8

const (
	msgPublish    messageKind = iota // batch of publishes from an event loop
	msgPropose                       // one record for the ledger, the metadata log or a system topic
	msgTrim                          // the store made everything up to round durable
	msgSnapshot                      // the store begins a sweep up to round and needs the producer windows
	msgDrop                          // topic was deleted
	msgQuarantine                    // the files of a partition turned out to be damaged
	msgReplica                       // from the other nodes, or about the shard's role among them
	msgClose                         // finish what is queued and stop
)

// message is what a shard's inbox carries.
type message struct {
	kind     messageKind
	topic    uint16
	index    uint16 // of the partition
	batch    *pubBatch
	proposal *proposal
	round    wal.RoundNumber
	replica  *replicaEvent
}

// partition is a shard's state of one partition.
type partition struct {
	stream wal.StreamID
	// last is the highest sequence appended, committed the highest that is durable and visible.
	last, committed wal.Sequence
	// lastMs is the timestamp of the last record; timestamps never decrease.
	lastMs uint64
	// window is the producer window last used: mostly the next publish is of the same producer.
	window *window
	// refusal is the answer to every publish where the partition's files are quarantined, otherwise empty: its
	// sequences can't be continued without knowing where they end.
	refusal string
}

const (
	// quarantinedText answers publishes to a partition whose files are damaged.
	quarantinedText = "this partition's files are damaged and quarantined: see the report beside them in the broker's data directory"
	// deletedText answers publishes to a topic that was deleted while they were on their way.
	deletedText = "the topic was deleted: DECLARE it again for a new id"
)

// refusal is the answer to what can't be acknowledged.
type refusal struct {
	code protocol.ErrorCode
	text string
}

func (r *refusal) err() error { return fmt.Errorf("%w: %s", r.code, r.text) }

// shard appends to one journal and answers when its rounds are committed. Its state belongs to one goroutine, locked to
// its thread; everyone else posts to the inbox.
type shard struct {
	id    int
	eng   *Engine
	log   *slog.Logger
	inbox *mpsc.Queue[message]
	store *storeLoop
	done  chan struct{}

	// Read by other goroutines.
	queued  atomic.Int64            // bytes of publishes that wait in the inbox and the backlog
	failure atomic.Pointer[refusal] // why nothing more is acknowledged
	stats   shardStats
	device  deviceRef

	// driving is held by whoever runs the shard's turns: its goroutine, or an event loop that lends its thread while the
	// goroutine sleeps and nothing is at the disk, see lend. It guards the rest.
	driving sync.Mutex
	lent    lentDisk

	// repl is the shard's part in a cluster, nil on a node on its own.
	repl *replication

	disk      Device
	journal   *wal.Journal
	dedup     *dedup
	topics    [][]*partition // by topic id, by partition
	gone      topicSet       // deleted topics, whose publishes and records may still be on their way
	ledgerSeq wal.Sequence   // last appended of the ledger stream
	metaSeq   wal.Sequence   // last appended of the metadata stream
	epoch     wal.Epoch
	// closing: finish what is queued; ended: that is done.
	closing, ended bool
	// published is the newest round that coordinator and store were given.
	published wal.RoundNumber
	// unwritten is the newest round that recovery could not write to segments, because the disk was full; 0: it wrote all.
	unwritten wal.RoundNumber
	// sweepBytes were committed since a sweep was last asked for.
	sweepBytes int64
	// quietBytes were handed over without a wake-up; at nudgeAt, if it is not 0, the wake-up is due.
	quietBytes int
	nudgeAt    time.Duration

	publishes fifo[*pubBatch] // backlog
	next      int             // the request of the first batch to take next
	proposals fifo[*proposal] // backlog; served before publishes
	spare     []message

	gathering roundAnswers       // of the round being filled
	inFlight  fifo[roundAnswers] // of the sealed rounds
	freeLists [][]answer         // emptied answer slices for reuse
	touched   []coord.Client     // clients with answers to flush
	frame     []byte
	record    wal.Record
	nowMs     uint64
}

// shardStats are counters that other goroutines read.
type shardStats struct {
	Rounds, Records, RoundBytes, Duplicates, Refused atomic.Uint64
}

func newShard(e *Engine, id int) *shard {
	s := &shard{id: id, eng: e, log: e.log.With("shard", id), done: make(chan struct{}), dedup: newDedup(dedupMaxBytes)}
	s.inbox = mpsc.New[message](s.device.wake)
	return s
}

// partitionOf returns the state of a partition, created on first use.
func (s *shard) partitionOf(topic, index uint16) *partition {
	for int(topic) >= len(s.topics) {
		s.topics = append(s.topics, nil)
	}
	parts := s.topics[topic]
	for int(index) >= len(parts) {
		parts = append(parts, nil)
	}
	s.topics[topic] = parts
	p := parts[index]
	if p == nil {
		p = &partition{stream: wal.StreamID{Kind: wal.Messages, Topic: topic, Partition: index}}
		parts[index] = p
	}
	return p
}

// run is the shard's goroutine. ready is closed, or sent an error, when it can take requests.
func (s *shard) run(ready chan<- error) {
	runtime.LockOSThread()
	defer close(s.done)
	s.driving.Lock()
	defer s.driving.Unlock()
	err := s.begin()
	ready <- err
	if err != nil {
		return
	}
	s.loop()
	s.end()
}

// begin opens the shard's ring. What comes then belongs to one goroutine, and end comes last.
func (s *shard) begin() error {
	d, err := s.eng.openDevice()
	if err != nil {
		return fmt.Errorf("shard %d: %w", s.id, err)
	}
	s.disk = d
	s.lent.on, _ = d.(executor)
	s.device.set(d)
	s.journal.SetDisk(d)
	s.journal.OnFlushed(s.flushed)
	return nil
}

// end closes the journal and gives the ring back.
func (s *shard) end() {
	d := s.disk
	if s.repl != nil {
		s.repl.release()
	}
	if err := s.journal.Close(waiter{d}); err != nil && s.failure.Load() == nil {
		s.log.Error("closing the journal", "err", err)
	}
	s.device.clear()
	if err := d.Close(); err != nil {
		s.log.Error("closing the shard's ring", "err", err)
	}
}

// leave refuses what came too late, after the shard's goroutine has ended: connections may outlive the engine.
func (s *shard) leave() {
	s.inbox.Close()
	f := s.failure.Load()
	if f == nil && s.repl != nil {
		f = s.repl.refusal()
	}
	if f == nil {
		f = &refusal{protocol.CodeReadOnlyDegraded, "the broker is shutting down: reconnect and send again"}
	}
	for _, m := range s.inbox.Drain(nil) {
		switch {
		case m.kind == msgPublish:
			s.refuseBatch(m.batch, f.code, f.text)
		case m.kind == msgReplica && m.replica.payload != nil:
			m.replica.payload.Release()
		}
	}
}

func (s *shard) loop() {
	for {
		progress, next := s.turn()
		if s.ended {
			return
		}
		if progress || !s.inbox.Sleep() {
			continue
		}
		err := s.wait(next)
		if err != nil {
			s.fail(fmt.Errorf("waiting for the disk: %w", err))
		}
		s.inbox.Awake()
		s.flushClients()
	}
}

// turn does everything that can be done without blocking. It reports whether something completed, so that there may be
// more to do at once, and otherwise when there will be. After the last turn, ended is set.
func (s *shard) turn() (progress bool, next time.Duration) {
	s.take()
	s.encode()
	s.submitRounds()
	s.flushClients() // of publishes that do not wait for the disk: Poll may be the write
	now := s.eng.now()
	next = s.journal.Step(now)
	if s.nudgeAt != 0 {
		if now >= s.nudgeAt {
			s.nudge()
		} else {
			next = min(next, s.nudgeAt)
		}
	}
	progress = s.disk.Poll() > 0
	if err := s.journal.Err(); err != nil && s.failure.Load() == nil {
		s.fail(err) // of a write that no round waits for
	}
	if s.repl != nil {
		next = min(next, s.repl.afterPoll(now))
	}
	s.flushClients()
	if !progress && s.closing && s.idle() {
		s.nudge()
		if s.repl == nil {
			s.published = s.journal.NextRound() - 1 // START rounds too: nothing is in flight
		}
		s.snapshot(s.published)
		s.ended = true
	}
	return progress, next
}

// timeout is how long the shard may sleep: until the journal's next step, and not long while something is refused for a
// reason that no message announces (space on the disk, the store's backlog).
func (s *shard) timeout(next time.Duration) time.Duration {
	d := s.eng.until(next)
	if s.timeoutShort() && (d < 0 || d > retryRefused) {
		d = retryRefused
	}
	return d
}

// retryRefused is after how long a shard looks again whether there is room for what waits.
const retryRefused = 2 * time.Millisecond

// timeoutShort tells whether something waits that no message announces.
func (s *shard) timeoutShort() bool {
	return s.closing || s.publishes.len() > 0 || s.proposals.len() > 0 || s.repl != nil && s.repl.waiting()
}

func (s *shard) idle() bool {
	records, _ := s.journal.Gathered()
	return s.publishes.len() == 0 && s.proposals.len() == 0 && records == 0 && s.journal.InFlight() == 0
}

// take moves the inbox into the backlogs.
func (s *shard) take() {
	items := s.inbox.Drain(s.spare)
	for i := range items {
		m := &items[i]
		switch m.kind {
		case msgPublish:
			s.publishes.push(m.batch)
		case msgPropose:
			s.proposals.push(m.proposal)
		case msgTrim:
			s.journal.Trim(m.round)
		case msgSnapshot:
			s.snapshot(m.round)
		case msgDrop:
			s.forget(m.topic)
		case msgQuarantine:
			if !s.gone.has(m.topic) {
				s.partitionOf(m.topic, m.index).refusal = quarantinedText
			}
		case msgReplica:
			s.repl.handle(m.replica)
		case msgClose:
			s.closing = true
		}
	}
	s.spare = items
}

// forget drops what is kept of a deleted topic; its id is never used again. Records of it that are still on their way to
// the disk are committed and dropped with the files, publishes that come from now on are refused.
func (s *shard) forget(topic uint16) {
	s.gone.add(topic)
	s.dedup.dropTopics(func(id uint16) bool { return id == topic })
	if int(topic) < len(s.topics) {
		s.topics[topic] = nil
	}
}

// snapshot gives the store the producer windows as of the last committed round, which is at least round: a sweep covers
// committed rounds only.
func (s *shard) snapshot(round wal.RoundNumber) {
	s.store.saveDedup(round, s.dedup.snapshot(func(id wal.StreamID) wal.Sequence {
		return s.partitionOf(id.Topic, id.Partition).committed
	}))
}
