package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
)

// faults decides what goes wrong at the disks of one engine. The zero value lets everything through.
type faults struct {
	// free replaces the free bytes of the file system, where it is not zero.
	free atomic.Int64

	mu    sync.Mutex
	check func(op *ring.Op) error
}

// set replaces what goes wrong. check is called by several goroutines; it may block, which stops that goroutine.
func (f *faults) set(check func(op *ring.Op) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.check = check
}

func (f *faults) of(op *ring.Op) error {
	f.mu.Lock()
	check := f.check
	f.mu.Unlock()
	if check == nil {
		return nil
	}
	return check(op)
}

// faultDevice is a ring that fails the operations that its faults name. Like a ring it belongs to one goroutine.
type faultDevice struct {
	*ring.Ring
	f      *faults
	failed []*ring.Op
	inline []*ring.Op // they run, and hang, in the next Poll or Wait, as a ring's do
}

func (f *faults) open(t testing.TB) func() (Device, error) {
	return func() (Device, error) {
		r, err := ring.New(ring.Options{Logger: testOptions("").Logger})
		if err != nil {
			t.Errorf("opening a ring: %v", err)
			return nil, err
		}
		return &faultDevice{Ring: r, f: f}, nil
	}
}

func (d *faultDevice) Submit(op *ring.Op) {
	if op.Inline {
		d.inline = append(d.inline, op)
		return
	}
	d.submit(op)
}

func (d *faultDevice) submitInline() {
	inline := d.inline
	d.inline = nil
	for _, op := range inline {
		d.submit(op)
	}
}

func (d *faultDevice) submit(op *ring.Op) {
	if err := d.f.of(op); err != nil {
		op.N, op.Err = 0, &ring.OpError{Kind: op.Kind, Path: op.Path, FD: op.FD, Off: op.Off, Err: err}
		d.failed = append(d.failed, op)
		d.Ring.Wake()
		return
	}
	if op.Kind == ring.StatFS {
		done := op.Done
		op.Done = func(op *ring.Op) {
			op.Done = done
			if free := d.f.free.Load(); free != 0 && op.Err == nil {
				op.Size = free
			}
			done(op)
		}
	}
	d.Ring.Submit(op)
}

// Execute runs on other goroutines.
func (d *faultDevice) Execute(op *ring.Op) {
	if err := d.f.of(op); err != nil {
		op.N, op.Err = 0, &ring.OpError{Kind: op.Kind, Path: op.Path, FD: op.FD, Off: op.Off, Err: err}
		op.Done(op)
		return
	}
	d.Ring.Execute(op)
}

func (d *faultDevice) fail() int {
	failed := d.failed
	d.failed = nil
	for _, op := range failed {
		op.Done(op)
	}
	return len(failed)
}

func (d *faultDevice) Poll() int {
	d.submitInline()
	return d.fail() + d.Ring.Poll()
}

func (d *faultDevice) Wait(timeout time.Duration) (int, error) {
	d.submitInline()
	n, err := d.Ring.Wait(timeout)
	return n + d.fail(), err
}

// openFaulty opens a broker whose disks f can fail, with a topic of one partition.
func openFaulty(t testing.TB) (f *faults, o Options, e *Engine, p *peer, topic uint16) {
	t.Helper()
	f = &faults{}
	o = testOptions(t.TempDir())
	o.OpenDevice = f.open(t)
	e = mustOpen(t, o)
	p = newPeer(t, e)
	return f, o, e, p, p.declare("t", 1).TopicID
}

// publishUntilRefused publishes on, behind from messages, until a publish is refused. It returns how many there are then.
func (p *peer) publishUntilRefused(topic uint16, from int) (acked int, err error) {
	p.t.Helper()
	for acked = from; err == nil; {
		var n int
		n, err = p.publishN(topic, acked, 1)
		acked += n
	}
	return acked, err
}

// publishN sends n plain publishes with increasing values, a few at a time, and returns how many were acknowledged
// before the first error, and that error.
func (p *peer) publishN(topic uint16, from, n int) (acked int, err error) {
	p.t.Helper()
	for acked < n {
		var reqs []uint64
		for i := range min(16, n-acked) {
			reqs = append(reqs, p.send(protocol.Pub{TopicID: topic, Value: binary.BigEndian.AppendUint64(make([]byte, 1016), uint64(from+acked+i))}))
		}
		flush(p.in)
		var first error
		for _, req := range reqs {
			if _, err := p.result(req); err != nil {
				first = errors.Join(first, err)
			} else if first != nil {
				p.t.Fatal("a publish was acknowledged behind one that failed")
			} else {
				acked++
			}
		}
		if first != nil {
			return acked, first
		}
	}
	return acked, nil
}

// reader is a group's only consumer, in STREAM mode, driven by the test.
type reader struct {
	*peer
	sub    protocol.SubResult
	parsed int
}

func (p *peer) subscribe(group string, topic uint16) *reader { return p.rejoin(group, topic, 0) }

// rejoin comes back as a member, whose partitions nobody else gets so soon; 0 is a new one.
func (p *peer) rejoin(group string, topic uint16, member uint64) *reader {
	p.t.Helper()
	req := p.c.request()
	m := protocol.Sub{Group: []byte(group), TopicID: topic, Partition: protocol.AnyPartition, CreditCount: 65535, CreditBytes: 64 << 20, Flags: protocol.SubFlagStream}
	if member != 0 {
		m.Flags |= protocol.SubFlagRejoin
		m.MemberID = member
	}
	p.in.Request(p.c, req, protocol.OpSub, payloadOf(m.AppendFrame(nil)))
	flush(p.in)
	b, err := p.c.answer(p.t, req)
	if err != nil {
		p.t.Fatalf("SUB: %v", err)
	}
	r := &reader{peer: p}
	if err := r.sub.Decode(b); err != nil {
		p.t.Fatal(err)
	}
	r.heartbeats()
	return r
}

// heartbeats keeps the member alive while the test waits, for the end of an earlier member's session for example.
func (r *reader) heartbeats() {
	stop := make(chan struct{})
	r.t.Cleanup(func() { close(stop) })
	in := r.in.eng.NewIngress() // an Ingress belongs to one goroutine
	m := protocol.Heartbeat{SubscriptionID: r.sub.SubscriptionID, MemberID: r.sub.MemberID,
		MembershipEpoch: r.sub.MembershipEpoch, AssignmentEpoch: r.sub.AssignmentEpoch}
	payload := payloadOf(m.AppendFrame(nil))
	go func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Second):
				in.Request(r.c, r.c.request(), protocol.OpHeartbeat, payload)
				flush(in)
			}
		}
	}()
}

// next waits for the next pushed message, confirming notices on the way.
func (r *reader) next() protocol.Msg {
	r.t.Helper()
	for {
		r.c.mu.Lock()
		for len(r.c.pushed) == r.parsed {
			r.c.changed.Wait()
		}
		op, payload, n, err := protocol.ParseFrame(r.c.pushed[r.parsed:])
		r.c.mu.Unlock()
		if err != nil || n == 0 {
			r.t.Fatalf("pushed bytes are no frame: %v", err)
		}
		r.parsed += n
		switch op {
		case protocol.OpMsg:
			var m protocol.Msg
			if err := m.Decode(payload); err != nil {
				r.t.Fatal(err)
			}
			return m
		case protocol.OpNotice:
			_, confirm := confirmation(r.t, payload)
			r.in.Request(r.c, r.c.request(), protocol.OpControlAck, payloadOf(confirm))
			flush(r.in)
		default:
			r.t.Fatalf("%v was pushed", op)
		}
	}
}

func (r *reader) ack(m *protocol.Msg) error {
	req := r.c.request()
	a := protocol.Ack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
		DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch}
	r.in.Request(r.c, req, protocol.OpAck, payloadOf(a.AppendFrame(nil)))
	flush(r.in)
	_, err := r.c.answer(r.t, req)
	return err
}

func wantValue(t testing.TB, m *protocol.Msg, seq int) {
	t.Helper()
	if m.Sequence != uint64(seq) || binary.BigEndian.Uint64(m.Value[len(m.Value)-8:]) != uint64(seq-1) {
		t.Fatalf("got sequence %d with value %d, want sequence %d", m.Sequence, binary.BigEndian.Uint64(m.Value[len(m.Value)-8:]), seq)
	}
}

func code(err error) protocol.ErrorCode {
	c, _ := protocol.CodeOf(err)
	return c
}

// closeFailed closes an engine whose disk failed; the error is expected.
func closeFailed(t testing.TB, e *Engine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := e.Close(ctx); err == nil {
		t.Error("closing says nothing of the failed disk")
	} else if ctx.Err() != nil {
		t.Fatalf("closing hangs: %v", err)
	}
}

// checkAll reads everything back after a restart: what was acknowledged is there, in order, with its bytes.
func checkAll(t testing.TB, o Options, name string, acked int) {
	t.Helper()
	e := mustOpen(t, o)
	defer mustClose(t, e)
	p := newPeer(t, e)
	r := p.subscribe("check", p.declare(name, 1).TopicID)
	for i := 1; i <= acked; i++ {
		m := r.next()
		wantValue(t, &m, i)
	}
}

func TestEngine_FailedJournalWriteStopsAcknowledging(t *testing.T) {
	f, o, e, p, topic := openFaulty(t)
	acked, err := p.publishN(topic, 0, 200)
	if err != nil {
		t.Fatal(err)
	}
	var failed atomic.Int32
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.WriteSync && failed.Add(1) == 1 {
			return unix.EIO
		}
		return nil
	})
	n, err := p.publishN(topic, acked, 200)
	if code(err) != protocol.CodeReadOnlyDegraded {
		t.Fatalf("after a failed write: %v, want 0x6002", err)
	}
	// The disk works again, but what the page cache and the device hold is not known: nothing may be acknowledged.
	if _, err := p.publishN(topic, acked+n, 1); code(err) != protocol.CodeReadOnlyDegraded {
		t.Errorf("a later publish: %v, want 0x6002", err)
	}
	if ok, state := e.Healthy(); ok {
		t.Errorf("health is %q", state)
	}
	closeFailed(t, e)
	f.set(nil)
	checkAll(t, o, "t", acked+n)
}

// The mark is written when nobody publishes: its failure is told at once, not with the next publish.
func TestEngine_FailedWriteOfAQuietJournalIsNoticed(t *testing.T) {
	f, _, e, p, topic := openFaulty(t)
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.WriteSync && bytes.HasPrefix(op.Buf, []byte("MMJM")) {
			return unix.EIO
		}
		return nil
	})
	if _, err := p.publishN(topic, 0, 1); err != nil {
		t.Fatal(err)
	}
	for begun := time.Now(); ; time.Sleep(time.Millisecond) {
		if ok, _ := e.Healthy(); !ok {
			break
		}
		if time.Since(begun) > time.Minute {
			t.Fatal("the broker is healthy although a write of its journal failed")
		}
	}
	if _, err := p.publishN(topic, 1, 1); code(err) != protocol.CodeReadOnlyDegraded {
		t.Errorf("a later publish: %v, want 0x6002", err)
	}
	closeFailed(t, e)
}

func TestEngine_FailedSegmentFlushStopsAcknowledging(t *testing.T) {
	f, o, e, p, topic := openFaulty(t)
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.Sync {
			return unix.EIO
		}
		return nil
	})
	acked, err := 0, error(nil)
	for err == nil && acked < 64<<10 { // several times the journal
		var n int
		n, err = p.publishN(topic, acked, 256)
		acked += n
	}
	if code(err) != protocol.CodeReadOnlyDegraded {
		t.Fatalf("with segments that can't be flushed: %v after %d, want 0x6002", err, acked)
	}
	closeFailed(t, e)
	f.set(nil)
	checkAll(t, o, "t", acked)
}

func TestEngine_FullDiskRefusesBeforeAcknowledgingAndResumes(t *testing.T) {
	t.Parallel()
	f, _, e, p, topic := openFaulty(t)
	defer mustClose(t, e)
	acked, err := p.publishN(topic, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	f.free.Store(1 << 20)
	// It takes until the free space is looked at.
	if acked, err = p.publishUntilRefused(topic, acked); code(err) != protocol.CodeStorageHighWatermark {
		t.Fatalf("on a full disk: %v, want 0x4004", err)
	}
	r := newPeer(t, e).subscribe("g", topic)
	for i := 1; i <= acked; i++ {
		m := r.next()
		wantValue(t, &m, i)
		if err := r.ack(&m); err != nil {
			t.Fatalf("ACK on a full disk: %v", err)
		}
	}
	f.free.Store(0)
	for {
		n, err := p.publishN(topic, acked, 1)
		if n == 1 {
			break
		}
		if code(err) != protocol.CodeStorageHighWatermark {
			t.Fatal(err)
		}
	}
	m := r.next()
	wantValue(t, &m, acked+1)
}

// TestEngine_SegmentsWithoutSpaceLoseNothing lets segment writes fail for want of space under load, until publishes are
// refused, and checks that everything goes on when there is space.
func TestEngine_SegmentsWithoutSpaceLoseNothing(t *testing.T) {
	t.Parallel()
	f, o, e, p, topic := openFaulty(t)
	var refused atomic.Int32
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.Write && refused.Add(1) > 3 {
			return unix.ENOSPC
		}
		return nil
	})
	acked, held := 0, 0
	for acked < 40<<10 {
		n, err := p.publishN(topic, acked, 40<<10-acked)
		acked += n
		switch {
		case code(err) == protocol.CodeStorageHighWatermark:
			held++
			f.set(nil) // there is room again
			time.Sleep(time.Millisecond)
		case err != nil:
			t.Fatalf("after %d: %v", acked, err)
		}
	}
	if held == 0 {
		t.Error("no publish was refused")
	}
	mustClose(t, e)
	o.OpenDevice = nil
	checkAll(t, o, "t", acked)
}

func TestEngine_ConsumerAcknowledgementsSurviveARestart(t *testing.T) {
	o := testOptions(t.TempDir())
	e := mustOpen(t, o)
	p := newPeer(t, e)
	topic := p.declare("t", 1).TopicID
	if _, err := p.publishN(topic, 0, 300); err != nil {
		t.Fatal(err)
	}
	r := newPeer(t, e).subscribe("g", topic)
	unacked := map[uint64]bool{}
	for i := 1; i <= 300; i++ {
		m := r.next()
		wantValue(t, &m, i)
		if i%7 == 0 {
			unacked[m.Sequence] = true
			continue
		}
		if err := r.ack(&m); err != nil {
			t.Fatal(err)
		}
	}
	e.ClientClosed(r.c)
	mustClose(t, e)
	e = mustOpen(t, o)
	defer mustClose(t, e)
	r = newPeer(t, e).rejoin("g", topic, r.sub.MemberID)
	for range len(unacked) {
		m := r.next()
		if !unacked[m.Sequence] {
			t.Fatalf("sequence %d came again after its ACK was answered", m.Sequence)
		}
		delete(unacked, m.Sequence)
	}
	if len(unacked) != 0 {
		t.Errorf("not delivered again: %v", unacked)
	}
}

// TestEngine_PublishDoesNotAllocatePerMessage publishes batches through the whole path, event loop side to answer, and
// looks at what the process allocated for it.
func TestEngine_PublishDoesNotAllocatePerMessage(t *testing.T) {
	e := mustOpen(t, testOptions(t.TempDir()))
	defer mustClose(t, e)
	p := newPeer(t, e)
	topic := p.declare("t", 4).TopicID
	c := &countingClient{testClient: newTestClient(), done: make(chan struct{}, 1)}
	value := make([]byte, 100)
	const batch = 2000
	var pseq [4]uint64
	step := func() {
		c.left.Store(batch)
		for i := range batch {
			part := i % 4
			pseq[part]++
			p.in.Publish(c, uint64(i), &protocol.Pub{TopicID: topic, Partition: uint16(part), ProducerID: 3, ProducerSeq: pseq[part], Value: value})
		}
		flush(p.in)
		<-c.done
	}
	for range 30 {
		step()
	}
	if n := testing.AllocsPerRun(50, step); n > batch/10 {
		t.Errorf("%v allocations for %d publishes", n, batch)
	}
}

// countingClient counts answers and keeps nothing.
type countingClient struct {
	*testClient
	left atomic.Int64
	done chan struct{}
}

func (c *countingClient) Complete(_ uint64, frame []byte) {
	if protocol.Op(frame[4]) != protocol.OpOK {
		panic(fmt.Sprintf("answer %x", frame))
	}
	if c.left.Add(-1) == 0 {
		c.done <- struct{}{}
	}
}

// TestEngine_SpaceReserveHoldsBetweenLooks: the free space is looked up once, and what is written afterwards counts
// nevertheless: a burst must not eat the reserve.
func TestEngine_SpaceReserveHoldsBetweenLooks(t *testing.T) {
	o := testOptions(t.TempDir())
	var f faults
	o.OpenDevice = f.open(t)
	const room = 40 << 20
	f.free.Store(spaceReserve + room)
	var looked atomic.Bool
	f.set(func(op *ring.Op) error {
		if op.Kind == ring.StatFS && looked.Swap(true) {
			return unix.EIO
		}
		return nil
	})
	e := mustOpen(t, o)
	defer mustClose(t, e)
	p := newPeer(t, e)
	topic := p.declare("t", 1).TopicID
	stored := 0
	for stored < 4*room/1024 {
		n, err := p.publishN(topic, stored, 64)
		stored += n
		if code, _ := protocol.CodeOf(err); code == protocol.CodeStorageHighWatermark {
			return
		} else if err != nil && code != protocol.CodeBackpressure {
			t.Fatal(err)
		}
	}
	t.Errorf("%d KiB were stored where there was room for %d", stored, room>>10)
}
