package peerwire

import (
	"encoding/binary"
	"fmt"

	"github.com/mortarmq/mortarmq/engine/replica"
)

const (
	// MaxPositions is how many streams one CATCHUP can name; a node with more sends several, all but the last with More.
	MaxPositions = 1 << 16
	// MaxReason is the length in bytes of the text of a FETCH_END or CATCHUP_CANCEL; what is longer is cut.
	MaxReason = 512

	positionLen = 16
)

// Transfer names a request of the bulk lane, and everything that answers it: the log, and a number that the node which
// asks has never used before since it started.
type Transfer struct {
	Log uint16
	ID  uint32
}

// Stream names a stream of a log: what wal.StreamID says, as numbers.
type Stream struct {
	Kind             uint8
	Topic, Partition uint16
}

// Position is the sequence with which a stream goes on.
type Position struct {
	Stream Stream
	Next   uint64
}

// BulkFrame is a frame of the bulk lane. Kinds for which HasPayload is true have a payload beside them.
type BulkFrame interface {
	// Kind returns the frame's kind.
	Kind() Kind
	// Of returns what the frame belongs to.
	Of() Transfer
	// AppendBody encodes everything of the body but the payload.
	AppendBody(b []byte) []byte

	decode(r *reader)
}

// Fetch asks for the rounds of a log behind the index After up to UpTo, as replica.FetchLog wants them: a candidate completes
// its log with them.
type Fetch struct {
	Transfer
	After replica.Index
	UpTo  replica.Point
}

// Fetched is one of the rounds that FETCH asked for, in order; its payload is as in APPEND.
type Fetched struct {
	Transfer
	Prev, Point replica.Point
	Commit      replica.Index // of the node that sends it
}

// FetchEnd ends the answer to FETCH: all rounds were sent if OK, else Reason says why not.
type FetchEnd struct {
	Transfer
	OK     bool
	Reason string
}

// Catchup asks for everything of a log that the streams named don't have yet, and for snapshots of the state beside them.
type Catchup struct {
	Transfer
	// Repair asks for the streams named only, and for no snapshots.
	Repair bool
	// More says that another CATCHUP of the same transfer names further streams.
	More      bool
	Positions []Position
}

// Part begins each frame of what CATCHUP asked for. Number counts the parts of the transfer from 1: one that was lost with its
// connection is missed, whatever it was, and the receiver asks anew.
type Part struct {
	Transfer
	Number uint32
}

// NumberedPart is a BulkFrame that begins with a Part.
type NumberedPart interface {
	BulkFrame
	// PartNumber returns the part's number.
	PartNumber() uint32
}

// Records carries committed records of one stream, back to back as they stand in a segment, in its payload.
type Records struct {
	Part
	Stream Stream
	First  uint64
	Count  uint32
}

// Skip says that the sender doesn't keep what a stream had before Next.
type Skip struct {
	Part
	Stream Stream
	Next   uint64
}

// What a snapshot is of.
const (
	SnapshotMetadata = 1
	SnapshotCursors  = 2
	SnapshotWindows  = 3
)

// Snapshot carries a piece of a snapshot, the bytes from Offset on of Total, in its payload.
type Snapshot struct {
	Part
	What          uint8
	Epoch         replica.Epoch
	Position      uint64 // the last sequence (of the windows: the log index) that it holds
	Offset, Total uint64
}

// CatchupDone says that everything was sent: with it the receiver has the log up to Point and may go on live.
type CatchupDone struct {
	Part
	Point  replica.Point
	Commit replica.Index
}

// CatchupAck says how many bytes of payload of the transfer are durable at its receiver.
type CatchupAck struct {
	Transfer
	Bytes uint64
}

// CatchupCancel ends a transfer before it is done; the node that was asked sends it. One that asks and wants no more asks anew,
// or breaks the connection: the two nodes may be asking each other, with the same ID.
type CatchupCancel struct {
	Transfer
	Reason string
}

// Behind tells a follower that the leader has no rounds of a log up to Base in memory any more: a follower whose log lacks that
// one catches up in bulk. Committed is a round that is committed and not before Base. ID is 0; as the answer to a FETCH it is
// that one's, and says the same of the node that was asked.
type Behind struct {
	Transfer
	Epoch           replica.Epoch // of the leader, or the one that the node has promised
	Base, Committed replica.Point
}

// Kind implements BulkFrame.
func (*Fetch) Kind() Kind         { return KindFetch }
func (*Fetched) Kind() Kind       { return KindFetched }
func (*FetchEnd) Kind() Kind      { return KindFetchEnd }
func (*Catchup) Kind() Kind       { return KindCatchup }
func (*Records) Kind() Kind       { return KindRecords }
func (*Skip) Kind() Kind          { return KindSkip }
func (*Snapshot) Kind() Kind      { return KindSnapshot }
func (*CatchupDone) Kind() Kind   { return KindCatchupDone }
func (*CatchupAck) Kind() Kind    { return KindCatchupAck }
func (*CatchupCancel) Kind() Kind { return KindCatchupCancel }
func (*Behind) Kind() Kind        { return KindBehind }

// Of implements BulkFrame.
func (t Transfer) Of() Transfer { return t }

// HasPayload reports whether frames of kind k have a payload. Only that of a probe and of an empty snapshot are empty.
func HasPayload(k Kind) bool {
	return k == KindAppend || k == KindFetched || k == KindRecords || k == KindSnapshot
}

// DecodeBulk decodes the body of a frame of the bulk lane and returns the payload behind it, nil for kinds without one.
// The payload aliases b; the frame doesn't.
func DecodeBulk(k Kind, b []byte) (f BulkFrame, payload []byte, err error) {
	switch k {
	case KindFetch:
		f = new(Fetch)
	case KindFetched:
		f = new(Fetched)
	case KindFetchEnd:
		f = new(FetchEnd)
	case KindCatchup:
		f = new(Catchup)
	case KindRecords:
		f = new(Records)
	case KindSkip:
		f = new(Skip)
	case KindSnapshot:
		f = new(Snapshot)
	case KindCatchupDone:
		f = new(CatchupDone)
	case KindCatchupAck:
		f = new(CatchupAck)
	case KindCatchupCancel:
		f = new(CatchupCancel)
	case KindBehind:
		f = new(Behind)
	default:
		return nil, nil, fmt.Errorf("%w: %v does not belong on the bulk lane", ErrBody, k)
	}
	r := reader{b: b}
	f.decode(&r)
	s, snapshot := f.(*Snapshot)
	switch {
	case r.bad:
		return nil, nil, malformed(k, "its fields are out of range or it is too short")
	case !HasPayload(k) && len(r.b) > 0:
		return nil, nil, malformed(k, fmt.Sprintf("there are %d bytes behind its fields", len(r.b)))
	case !HasPayload(k):
		return f, nil, nil
	case len(r.b) == 0 && !(snapshot && s.Total == 0):
		return nil, nil, malformed(k, "it has no payload")
	}
	return f, r.b, nil
}

func (t Transfer) appendTo(b []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, t.Log)
	return binary.BigEndian.AppendUint32(b, t.ID)
}

func (t *Transfer) decode(r *reader) { *t = Transfer{Log: r.u16(), ID: r.u32()} }

// PartNumber implements NumberedPart.
func (p Part) PartNumber() uint32 { return p.Number }

func (p Part) appendTo(b []byte) []byte {
	return binary.BigEndian.AppendUint32(p.Transfer.appendTo(b), p.Number)
}

func (p *Part) decode(r *reader) {
	p.Transfer.decode(r)
	p.Number = r.u32()
	r.bad = r.bad || p.Number == 0
}

func appendStream(b []byte, s Stream) []byte {
	b = append(b, s.Kind, 0)
	b = binary.BigEndian.AppendUint16(b, s.Topic)
	return binary.BigEndian.AppendUint16(b, s.Partition)
}

func (r *reader) stream() Stream {
	kind := r.u8()
	r.zeros(1)
	return Stream{Kind: kind, Topic: r.u16(), Partition: r.u16()}
}

func appendReason(b []byte, s string) []byte {
	s = s[:min(len(s), MaxReason)]
	b = binary.BigEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

func (r *reader) reason() string {
	n := int(r.u16())
	r.bad = r.bad || n > MaxReason
	return string(r.take(n))
}

// AppendBody implements BulkFrame.
func (f *Fetch) AppendBody(b []byte) []byte {
	return appendPoint(binary.BigEndian.AppendUint64(f.appendTo(b), uint64(f.After)), f.UpTo)
}

func (f *Fetch) decode(r *reader) {
	f.Transfer.decode(r)
	f.After, f.UpTo = replica.Index(r.u64()), r.point()
	r.bad = r.bad || f.After >= f.UpTo.Index
}

// AppendBody implements BulkFrame.
func (f *Fetched) AppendBody(b []byte) []byte {
	b = appendPoint(f.appendTo(b), f.Prev)
	return binary.BigEndian.AppendUint64(appendPoint(b, f.Point), uint64(f.Commit))
}

func (f *Fetched) decode(r *reader) {
	f.Transfer.decode(r)
	f.Prev, f.Point, f.Commit = r.point(), r.point(), replica.Index(r.u64())
	r.bad = r.bad || f.Point.Index != f.Prev.Index+1 || f.Prev.Epoch > f.Point.Epoch
}

// AppendBody implements BulkFrame.
func (f *FetchEnd) AppendBody(b []byte) []byte {
	return appendReason(appendFlag(f.appendTo(b), f.OK), f.Reason)
}

func (f *FetchEnd) decode(r *reader) {
	f.Transfer.decode(r)
	f.OK, f.Reason = r.flag(), r.reason()
}

// AppendBody implements BulkFrame.
func (f *Catchup) AppendBody(b []byte) []byte {
	b = appendFlag(appendFlag(f.appendTo(b), f.Repair), f.More)
	b = binary.BigEndian.AppendUint32(b, uint32(len(f.Positions)))
	for _, p := range f.Positions {
		b = appendStream(b, p.Stream)
		b = binary.BigEndian.AppendUint16(b, 0)
		b = binary.BigEndian.AppendUint64(b, p.Next)
	}
	return b
}

func (f *Catchup) decode(r *reader) {
	f.Transfer.decode(r)
	f.Repair, f.More = r.flag(), r.flag()
	n := r.count(positionLen)
	if n > MaxPositions {
		r.bad = true
		return
	}
	if n > 0 {
		f.Positions = make([]Position, n)
	}
	for i := range f.Positions {
		p := &f.Positions[i]
		p.Stream = r.stream()
		r.zeros(2)
		p.Next = r.u64()
	}
}

// AppendBody implements BulkFrame.
func (f *Records) AppendBody(b []byte) []byte {
	b = appendStream(f.appendTo(b), f.Stream)
	b = binary.BigEndian.AppendUint64(b, f.First)
	return binary.BigEndian.AppendUint32(b, f.Count)
}

func (f *Records) decode(r *reader) {
	f.Part.decode(r)
	f.Stream, f.First, f.Count = r.stream(), r.u64(), r.u32()
	r.bad = r.bad || f.First == 0 || f.Count == 0 || f.First+uint64(f.Count) < f.First
}

// AppendBody implements BulkFrame.
func (f *Skip) AppendBody(b []byte) []byte {
	return binary.BigEndian.AppendUint64(appendStream(f.appendTo(b), f.Stream), f.Next)
}

func (f *Skip) decode(r *reader) {
	f.Part.decode(r)
	f.Stream, f.Next = r.stream(), r.u64()
}

// AppendBody implements BulkFrame.
func (f *Snapshot) AppendBody(b []byte) []byte {
	b = append(f.appendTo(b), f.What, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(f.Epoch))
	b = binary.BigEndian.AppendUint64(b, f.Position)
	b = binary.BigEndian.AppendUint64(b, f.Offset)
	return binary.BigEndian.AppendUint64(b, f.Total)
}

func (f *Snapshot) decode(r *reader) {
	f.Part.decode(r)
	f.What = r.u8()
	r.zeros(1)
	f.Epoch, f.Position, f.Offset, f.Total = replica.Epoch(r.u32()), r.u64(), r.u64(), r.u64()
	r.bad = r.bad || f.What < SnapshotMetadata || f.What > SnapshotWindows ||
		f.Offset > f.Total || uint64(len(r.b)) > f.Total-f.Offset
}

// AppendBody implements BulkFrame.
func (f *CatchupDone) AppendBody(b []byte) []byte {
	return binary.BigEndian.AppendUint64(appendPoint(f.appendTo(b), f.Point), uint64(f.Commit))
}

func (f *CatchupDone) decode(r *reader) {
	f.Part.decode(r)
	f.Point, f.Commit = r.point(), replica.Index(r.u64())
}

// AppendBody implements BulkFrame.
func (f *CatchupAck) AppendBody(b []byte) []byte {
	return binary.BigEndian.AppendUint64(f.appendTo(b), f.Bytes)
}

func (f *CatchupAck) decode(r *reader) {
	f.Transfer.decode(r)
	f.Bytes = r.u64()
}

// AppendBody implements BulkFrame.
func (f *CatchupCancel) AppendBody(b []byte) []byte { return appendReason(f.appendTo(b), f.Reason) }

func (f *CatchupCancel) decode(r *reader) {
	f.Transfer.decode(r)
	f.Reason = r.reason()
}

// AppendBody implements BulkFrame.
func (f *Behind) AppendBody(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(f.appendTo(b), uint32(f.Epoch))
	return appendPoint(appendPoint(b, f.Base), f.Committed)
}

func (f *Behind) decode(r *reader) {
	f.Transfer.decode(r)
	f.Epoch, f.Base, f.Committed = replica.Epoch(r.u32()), r.point(), r.point()
	r.bad = r.bad || f.Epoch == 0 || f.Committed.Index < f.Base.Index
}
