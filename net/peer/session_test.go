package peer

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/s2"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// heardConn is a connection on which the other end says what it was given, and then closes.
type heardConn struct {
	net.Conn
	in io.Reader
}

func (c *heardConn) Read(b []byte) (int, error)      { return c.in.Read(b) }
func (c *heardConn) SetReadDeadline(time.Time) error { return nil }
func (c *heardConn) Close() error                    { return nil }

// frame encodes a frame with a good checksum.
func frame(version uint8, k peerwire.Kind, flags uint8, body []byte) []byte {
	b := make([]byte, peerwire.HeaderLen, peerwire.HeaderLen+len(body))
	peerwire.PutHeader(b, &peerwire.Header{Version: version, Kind: k, Flags: flags, Len: len(body)})
	b = append(b, body...)
	var sum peerwire.Hasher
	peerwire.PutSum(b, sum.Sum(b, body, nil))
	return b
}

// listenTo reads a session to its end and returns the error with which that came, and what the handler was given.
func listenTo(t testing.TB, lane peerwire.Lane, said []byte) ([]event, error) {
	t.Helper()
	rec := newRecorder()
	tr, err := New(Options{
		Self: 2, Addr: "127.0.0.1:0", Peers: map[replica.NodeID]string{1: "127.0.0.1:1"}, Handler: rec,
		Identity: func() Identity { return testIdentity },
	})
	if err != nil {
		t.Fatal(err)
	}
	l := tr.link(1, lane)
	s := newSession(l, &accepted{conn: &heardConn{in: bytes.NewReader(said)}, peer: Peer{Version: 1}})
	l.queue.start(1, nil)
	err = s.readLoop()
	if l.budget.taken != 0 {
		t.Errorf("%d bytes were never released", l.budget.taken)
	}
	return rec.events, err
}

func TestSession_RefusesFramesThatDoNotBelongThere(t *testing.T) {
	flushed := make([]byte, peerwire.FlushedLen)
	peerwire.PutFlushed(flushed, &peerwire.Flushed{Epoch: 1})
	records := (&peerwire.Records{Part: peerwire.Part{Number: 1}, First: 1, Count: 1}).AppendBody(nil)
	badSum := frame(1, peerwire.KindFlushed, 0, flushed)
	badSum[20] ^= 1
	tooLong := frame(1, peerwire.KindFetchEnd, 0, nil)
	tooLong[4] = 0x10
	bomb := s2.Encode(nil, make([]byte, peerwire.MaxBody+1))
	for name, c := range map[string]struct {
		lane peerwire.Lane
		said []byte
		want string
	}{
		"another version":         {peerwire.Log, frame(2, peerwire.KindFlushed, 0, flushed), "has version 2, agreed was 1"},
		"another lane":            {peerwire.Bulk, frame(1, peerwire.KindFlushed, 0, flushed), "FLUSHED does not belong on the lane bulk"},
		"a handshake":             {peerwire.Log, frame(1, peerwire.KindHello, 0, flushed), "HELLO does not belong"},
		"a kind that isn't":       {peerwire.Log, frame(1, 77, 0, flushed), "kind 77 does not belong"},
		"a bad checksum":          {peerwire.Log, badSum, "checksum"},
		"no frame":                {peerwire.Log, []byte("GET / HTTP/1.1\r\n"), "no frame of a MortarMQ peer"},
		"a length beyond any":     {peerwire.Bulk, tooLong, "longer than any may be"},
		"a body too short":        {peerwire.Log, frame(1, peerwire.KindFlushed, 0, flushed[:5]), "FLUSHED: it has 5 bytes"},
		"a PING too long":         {peerwire.Log, frame(1, peerwire.KindPing, 0, flushed), "PING has 24 bytes"},
		"a round of nothing":      {peerwire.Log, frame(1, peerwire.KindAppend, 0, flushed), "APPEND: it is too short"},
		"records of nothing":      {peerwire.Bulk, frame(1, peerwire.KindRecords, 0, records), "RECORDS: it has no payload"},
		"a message of nothing":    {peerwire.Control, frame(1, peerwire.KindMessage, 0, nil), "MESSAGE: it is too short"},
		"compressed where it can": {peerwire.Bulk, frame(1, peerwire.KindRecords, peerwire.FlagS2, []byte("no S2 at all")), "compressed frame"},
		"compressed where it can't": {
			peerwire.Log, frame(1, peerwire.KindFlushed, peerwire.FlagS2, s2.Encode(nil, flushed)), "compressed, which it may not be",
		},
		"compressed far too much": {peerwire.Bulk, frame(1, peerwire.KindRecords, peerwire.FlagS2, bomb), "longer than any may be"},
		"cut in the header":       {peerwire.Log, frame(1, peerwire.KindFlushed, 0, flushed)[:9], "EOF"},
		"cut in the body":         {peerwire.Log, frame(1, peerwire.KindFlushed, 0, flushed)[:30], "EOF"},
		"cut in a large body":     {peerwire.Log, frame(1, peerwire.KindAppend, 0, make([]byte, 3<<20))[:2<<20], "EOF"},
	} {
		events, err := listenTo(t, c.lane, append(frame(1, peerwire.KindPing, 0, make([]byte, pingLen)), c.said...))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if len(events) != 0 {
			t.Errorf("%s: the handler was given %+v", name, events)
		}
	}
}

func TestSession_LengthAloneClaimsNoMemory(t *testing.T) {
	head := frame(1, peerwire.KindAppend, 0, nil)
	peerwire.PutHeader(head, &peerwire.Header{Version: 1, Kind: peerwire.KindAppend, Len: peerwire.MaxBody})
	rec := newRecorder()
	tr, err := New(Options{
		Self: 2, Addr: "127.0.0.1:0", Peers: map[replica.NodeID]string{1: "127.0.0.1:1"}, Handler: rec,
		Identity: func() Identity { return testIdentity },
	})
	if err != nil {
		t.Fatal(err)
	}
	s := newSession(tr.link(1, peerwire.Log), &accepted{conn: &heardConn{in: bytes.NewReader(head)}, peer: Peer{Version: 1}})
	if err := s.readLoop(); !errors.Is(err, io.EOF) {
		t.Errorf("it ends with %v", err)
	}
	if tr.payloads.kept > firstPiece {
		t.Errorf("%d bytes were allocated for a frame that never came", tr.payloads.kept)
	}
}

func TestPayload_ReleasedTwiceIsABug(t *testing.T) {
	var pool payloadPool
	p := pool.get(10)
	p.budget, p.data = newBudget(1), p.buf
	p.Release()
	defer func() {
		if recover() == nil {
			t.Error("nobody noticed")
		}
	}()
	p.Release()
}

func TestPayload_PoolKeepsNoMoreThanItMay(t *testing.T) {
	var pool payloadPool
	var all []*Payload
	for range 5 {
		all = append(all, pool.get(peerwire.MaxBody))
	}
	for _, p := range all {
		pool.put(p)
	}
	if pool.kept > keptPayloads {
		t.Errorf("%d bytes are kept", pool.kept)
	}
	if p := pool.get(peerwire.MaxBody); p != all[0] {
		t.Error("what was kept is not used again")
	}
	for _, n := range []int{0, 1, 4096, 4097, 1 << 20, 1<<20 + 1, peerwire.MaxBody} {
		if p := pool.get(n); len(p.buf) < n || len(p.buf) > max(2*n, 4096) {
			t.Errorf("for %d bytes there are %d", n, len(p.buf))
		}
	}
}

// FuzzSession reads frames whose checksums are good. They must reach the handler or end the connection; nothing panics and
// no memory is left behind.
func FuzzSession(f *testing.F) {
	f.Add(uint8(1), uint8(peerwire.KindFlushed), uint8(0), make([]byte, peerwire.FlushedLen), []byte{})
	f.Add(uint8(1), uint8(peerwire.KindAppend), uint8(0), make([]byte, peerwire.AppendLen), frame(1, peerwire.KindPing, 0, make([]byte, 8)))
	f.Add(uint8(0), uint8(peerwire.KindMessage), uint8(0), peerwire.AppendMessage(nil, &replica.Message{Kind: 1}), []byte("x"))
	records := append((&peerwire.Records{Part: peerwire.Part{Number: 1}, First: 1, Count: 1}).AppendBody(nil), "records"...)
	f.Add(uint8(2), uint8(peerwire.KindRecords), uint8(1), s2.Encode(nil, records), []byte{})
	f.Fuzz(func(t *testing.T, lane, kind, flags uint8, body, rest []byte) {
		said := append(frame(1, peerwire.Kind(kind), flags, body), rest...)
		if _, err := listenTo(t, peerwire.Lane(lane)%peerwire.Lanes, said); err == nil {
			t.Error("a connection that was closed goes on")
		}
	})
}
