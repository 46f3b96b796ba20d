package peer

import (
	"bytes"
	"math/rand/v2"
	"reflect"
	"strconv"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// randomBytes returns n bytes that don't compress.
func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{3}).Read(b) // never fails
	return b
}

func TestTransport_SlowReaderIsHeldUpWithinBoundsAndOnItsOwnLaneOnly(t *testing.T) {
	for _, size := range []int{directBytes / 2, 64 << 10} { // written by the sender, while the socket takes it, and by the writer
		t.Run(strconv.Itoa(size), func(t *testing.T) { slowReader(t, size) })
	}
}

func slowReader(t *testing.T, size int) {
	const unreleased, queued = 1 << 20, 1 << 20
	nodes := newNodes(t, 2, func(o *Options) {
		o.Unreleased, o.LogQueue = unreleased, queued
	})
	waitConnected(t, nodes)
	a, b := nodes[0], nodes[1]
	b.rec.hold.Store(true)
	payload := randomBytes(size)
	var own owner
	sent := 0
	// The reader holds what it was given, so sooner or later everything in between is full.
	eventually(t, "a refusal", func() bool {
		f := numbered(sent + 1)
		if a.Append(b.id, &f, payload, &own) {
			sent++
			return false
		}
		lanes, _ := a.Stats()
		return lanes[peerwire.Log].QueuedBytes > int64(queued-size-100) &&
			b.rec.count(func(e *event) bool { return e.what == "APPEND" }) == unreleased/size-1
	})
	// The other lanes go on meanwhile.
	for i := range 10 {
		m := replica.Message{Kind: replica.KindHeartbeat, Epoch: replica.Epoch(i + 1)}
		a.Message(b.id, &m)
		got := b.rec.wait(t, "a heartbeat", i+1, func(e *event) bool { return e.what == "MESSAGE" })
		if got[i].message.Epoch != m.Epoch {
			t.Errorf("the heartbeat is %+v", got[i].message)
		}
	}
	if n := b.rec.count(func(e *event) bool { return e.what == "APPEND" }); n > unreleased/size {
		t.Errorf("%d rounds of %d KiB were handed to a reader that releases none", n, size>>10)
	}
	b.rec.letGo()
	a.rec.wait(t, "writable", 1, func(e *event) bool { return e.what == "writable" && e.lane == peerwire.Log })
	got := b.rec.wait(t, "the rest", sent, func(e *event) bool { return e.what == "APPEND" })
	for i, e := range got {
		if e.append != numbered(i+1) || !bytes.Equal(e.payload, payload) {
			t.Fatalf("APPEND %d is %+v", i, e.append)
		}
	}
	eventually(t, "all releases", func() bool { return own.released.Load() == int64(sent) })
}

func TestTransport_CloseDoesNotWaitForAReaderThatIsHeldUp(t *testing.T) {
	nodes := newNodes(t, 2, func(o *Options) { o.Unreleased, o.LogQueue = 100_000, 100_000 })
	waitConnected(t, nodes)
	a, b := nodes[0], nodes[1]
	b.rec.hold.Store(true)
	var own owner
	sent := int64(0)
	payload := randomBytes(64 << 10)
	eventually(t, "a refusal", func() bool {
		f := numbered(1)
		if a.Append(b.id, &f, payload, &own) {
			sent++
			return false
		}
		return b.rec.count(func(e *event) bool { return e.what == "APPEND" }) > 0
	})
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if n := own.released.Load(); n != sent {
		t.Errorf("%d of %d rounds were released", n, sent)
	}
	if f := numbered(1); a.Append(b.id, &f, payload, &own) || a.Flushed(b.id, new(peerwire.Flushed)) {
		t.Error("a closed transport takes frames")
	}
}

func TestTransport_NothingIsTakenForNodesThatAreNotConnected(t *testing.T) {
	n := newNodes(t, 1, func(o *Options) { o.Peers = map[replica.NodeID]string{2: "127.0.0.1:1"} })[0]
	var own owner
	for _, to := range []replica.NodeID{2, 3} {
		f := numbered(1)
		if n.Append(to, &f, []byte("x"), &own) || n.Flushed(to, new(peerwire.Flushed)) || n.Reject(to, new(peerwire.Reject)) ||
			n.Message(to, new(replica.Message)) || n.Bulk(to, new(peerwire.Fetch), nil, nil) {
			t.Errorf("a frame for node %d was taken", to)
		}
	}
	if own.released.Load() != 0 {
		t.Error("a round that was not taken was released")
	}
}

func TestTransport_FlushedOfTheSameLogReplaceEachOther(t *testing.T) {
	q := newQueue(1 << 20)
	q.start(1, nil)
	for i := range 100 {
		for log := range 3 {
			q.putFlushed(&peerwire.Flushed{Log: uint16(log), Epoch: 1, Index: replica.Index(100*log + i)})
		}
	}
	var b batch
	q.take(&b)
	if len(b.small) != 3 || len(b.frames) != 0 {
		t.Fatalf("%d frames are to be sent", len(b.small))
	}
	for log := range b.small {
		var f peerwire.Flushed
		if err := peerwire.DecodeFlushed(b.small[log].head[peerwire.HeaderLen:b.small[log].n], &f); err != nil || f.Index != replica.Index(100*log+99) {
			t.Errorf("%+v, %v", f, err)
		}
	}
	q.written(0)
	if q.take(&b); !b.empty() {
		t.Errorf("%d frames are sent twice", len(b.small))
	}
}

func TestTransport_FramesOfEverySizeArriveWhole(t *testing.T) {
	nodes := newNodes(t, 2, nil)
	waitConnected(t, nodes)
	a, b := nodes[0], nodes[1]
	all := randomBytes(17 << 20)
	for i, size := range []int{0, 1, 100, 4 << 10, readBuffer - 48, readBuffer, firstPiece, firstPiece + 1, 5_000_000, len(all)} {
		f := numbered(i + 1)
		if size == 0 {
			f.Point = replica.Point{}
		}
		var own owner
		if !a.Append(b.id, &f, all[:size], &own) {
			t.Fatalf("a round of %d bytes was refused", size)
		}
		got := b.rec.wait(t, "APPEND", i+1, func(e *event) bool { return e.what == "APPEND" })[i]
		if got.append != f || !bytes.Equal(got.payload, all[:size]) {
			t.Errorf("a round of %d bytes arrives as %+v with %d", size, got.append, len(got.payload))
		}
		eventually(t, "the release", func() bool { return own.released.Load() == 1 })
	}
}

func TestTransport_BulkFramesTravelCompressedWhereThatPays(t *testing.T) {
	nodes := newNodes(t, 2, nil)
	waitConnected(t, nodes)
	a, b := nodes[0], nodes[1]
	transfer := peerwire.Transfer{Log: 1, ID: 5}
	part := peerwire.Part{Transfer: transfer, Number: 6}
	stream := peerwire.Stream{Kind: 1, Topic: 2, Partition: 3}
	n := 0
	for _, c := range []struct {
		name    string
		frame   peerwire.BulkFrame
		payload []byte
		most    uint64 // bytes on the wire
	}{
		{"text", &peerwire.Records{Part: part, Stream: stream, First: 1, Count: 9}, bytes.Repeat([]byte("all alike "), 300_000), 200_000},
		{"noise", &peerwire.Records{Part: part, Stream: stream, First: 1, Count: 9}, randomBytes(3_000_000), 3_001_000},
		{"little", &peerwire.Fetched{Transfer: transfer, Point: replica.Point{Epoch: 1, Index: 1}}, []byte("a round"), 1000},
		{"a snapshot", &peerwire.Snapshot{Part: part, What: peerwire.SnapshotWindows, Epoch: 1, Total: 1 << 20}, make([]byte, 1<<20), 100_000},
		{"nothing", &peerwire.Snapshot{Part: part, What: peerwire.SnapshotMetadata, Epoch: 1}, nil, 1000},
		{"many streams", &peerwire.Catchup{Transfer: transfer, Positions: make([]peerwire.Position, 60_000)}, nil, 100_000},
		{"few streams", &peerwire.Catchup{Transfer: transfer, Positions: make([]peerwire.Position, 5000)}, nil, 10_000},
		{"an end", &peerwire.CatchupDone{Part: part, Point: replica.Point{Epoch: 1, Index: 1}}, nil, 1000},
	} {
		before, _ := a.Stats()
		var own owner
		if !a.Bulk(b.id, c.frame, c.payload, &own) {
			t.Fatalf("%s: refused", c.name)
		}
		n++
		got := b.rec.wait(t, c.name, n, func(e *event) bool { return e.lane == peerwire.Bulk && e.bulk != nil })[n-1]
		if !reflect.DeepEqual(got.bulk, c.frame) || !bytes.Equal(got.payload, c.payload) {
			t.Errorf("%s arrives as %v with %d bytes", c.name, got.bulk.Kind(), len(got.payload))
		}
		after, _ := a.Stats()
		if wire := after[peerwire.Bulk].SentBytes - before[peerwire.Bulk].SentBytes; wire > c.most {
			t.Errorf("%s takes %d bytes on the wire", c.name, wire)
		}
	}
}

func TestTransport_NewConnectionOfAPeerTakesThePlaceOfTheOldOne(t *testing.T) {
	nodes := newNodes(t, 2, func(o *Options) {
		if o.Self == 2 {
			o.IdleTimeout = patience // it would not notice by itself
		}
		if o.Self == 1 {
			o.IdleTimeout, o.BackoffMax = 50*time.Millisecond, 10*time.Millisecond
			o.PingInterval = patience // and so it hears nothing, and calls again
		}
	})
	nodes[1].rec.wait(t, "three connections on a lane", 3, connectedOn(peerwire.Log, 1))
	alternates(t, nodes[1])
}

func TestTransport_SteadyStateAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	echo := &echoHandler{flushed: make(chan peerwire.Flushed, 1)}
	nodes := newNodes(t, 2, func(o *Options) {
		o.Handler = echo
		o.PingInterval, o.IdleTimeout = patience, 2*patience
	})
	echo.to = nodes[1]
	eventually(t, "a connection", func() bool {
		return nodes[0].Flushed(2, new(peerwire.Flushed)) && nodes[1].Flushed(1, new(peerwire.Flushed))
	})
	payload := randomBytes(8 << 10)
	var own owner
	index := replica.Index(0)
	a := numbered(1)
	run := func() {
		index++
		a.Point.Index, a.Prev.Index = index, index-1
		if !nodes[0].Append(2, &a, payload, &own) {
			t.Fatal("refused")
		}
		for f := range echo.flushed {
			if f.Index == index {
				break
			}
		}
	}
	for range 100 {
		run()
	}
	if n := testing.AllocsPerRun(1000, run); n != 0 {
		t.Errorf("%v allocations for an APPEND and its FLUSHED", n)
	}
}

// echoHandler answers each APPEND with a FLUSHED.
type echoHandler struct {
	to      *node
	flushed chan peerwire.Flushed
}

func (h *echoHandler) Connected(replica.NodeID, peerwire.Lane, Peer)             {}
func (h *echoHandler) Disconnected(replica.NodeID, peerwire.Lane, error)         {}
func (h *echoHandler) Writable(replica.NodeID, peerwire.Lane)                    {}
func (h *echoHandler) Message(replica.NodeID, *replica.Message)                  {}
func (h *echoHandler) Reject(replica.NodeID, *peerwire.Reject)                   {}
func (h *echoHandler) Bulk(replica.NodeID, peerwire.BulkFrame, peerwire.Payload) {}
func (h *echoHandler) Append(from replica.NodeID, a *peerwire.Append, p peerwire.Payload) {
	p.Release()
	h.to.Flushed(from, &peerwire.Flushed{Epoch: a.Epoch, Index: a.Point.Index})
}
func (h *echoHandler) Flushed(_ replica.NodeID, f *peerwire.Flushed) {
	if f.Index > 0 {
		h.flushed <- *f
	}
}
