package peerwire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/replica"
)

// unhex decodes hex with spaces.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(string(bytes.ReplaceAll([]byte(s), []byte(" "), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	testAppend = Append{
		Log: 0x0102, Epoch: 9, Prev: replica.Point{Epoch: 7, Index: 0x1122334455667788}, Point: replica.Point{Epoch: 8, Index: 0x1122334455667789},
		Commit: 0x0A0B0C0D0E0F1011,
	}
	testProbe   = Append{Log: 1, Epoch: 9, Prev: replica.Point{Epoch: 7, Index: 12}, Commit: 11}
	testFlushed = Flushed{Log: 3, Voter: true, Epoch: 5, Index: 0x0102030405060708, Instance: 0xF1F2F3F4F5F6F7F8}
	testReject  = Reject{
		Log: 3, Verdict: replica.Gap, Epoch: 5, Known: 6, End: replica.End{Last: replica.Point{Epoch: 4, Index: 77}, Commit: 70}, Instance: 9,
	}
	testTransfer = Transfer{Log: 2, ID: 0xA1A2A3A4}
	testPart     = Part{testTransfer, 0xB1B2B3B4}
	testMessage  = replica.Message{
		Kind: replica.KindPromise, Epoch: 0x01020304, Cluster: replica.ClusterID{0xC0, 15: 0xCF}, Stage: replica.Formed, Logs: 2,
		Reason: replica.NoVote, Granted: true, Confirmed: true, Standing: replica.Suspect, Instance: 0x1112131415161718,
		Session: 0x2122232425262728, Sent: 3 * time.Second,
		Ends: []replica.End{
			{Last: replica.Point{Epoch: 3, Index: 30}, Commit: 29, Floor: replica.Point{Epoch: 2, Index: 29}},
			{Last: replica.Point{Epoch: 4, Index: 40}, Commit: 38, Floor: replica.Point{Epoch: 5, Index: 50}},
		},
		Commits: []replica.Index{28, 37},
	}
)

// bulkCases has a frame of every kind of the bulk lane with its bytes, frozen: they are never regenerated.
func bulkCases() []struct {
	frame   BulkFrame
	payload []byte
	bytes   string
} {
	return []struct {
		frame   BulkFrame
		payload []byte
		bytes   string
	}{
		{&Fetch{testTransfer, 16, replica.Point{Epoch: 3, Index: 17}}, nil,
			"0002 a1a2a3a4 0000000000000010 00000003 0000000000000011"},
		{&Fetched{testTransfer, replica.Point{Epoch: 2, Index: 16}, replica.Point{Epoch: 3, Index: 17}, 15}, []byte("round"),
			"0002 a1a2a3a4 00000002 0000000000000010 00000003 0000000000000011 000000000000000f"},
		{&FetchEnd{testTransfer, true, ""}, nil, "0002 a1a2a3a4 01 0000"},
		{&FetchEnd{testTransfer, false, "gone"}, nil, "0002 a1a2a3a4 00 0004 676f6e65"},
		{&Catchup{testTransfer, false, false, nil}, nil, "0002 a1a2a3a4 00 00 00000000"},
		{&Catchup{testTransfer, true, true, []Position{{Stream{1, 2, 3}, 4}, {Stream{3, 0, 0}, 1}}}, nil,
			"0002 a1a2a3a4 01 01 00000002 01 00 0002 0003 0000 0000000000000004 03 00 0000 0000 0000 0000000000000001"},
		{&Records{testPart, Stream{1, 2, 3}, 100, 5}, []byte("five records"),
			"0002 a1a2a3a4 b1b2b3b4 01 00 0002 0003 0000000000000064 00000005"},
		{&Skip{testPart, Stream{1, 2, 3}, 1000}, nil, "0002 a1a2a3a4 b1b2b3b4 01 00 0002 0003 00000000000003e8"},
		{&Snapshot{testPart, SnapshotCursors, 6, 50, 4, 9}, []byte("piece"),
			"0002 a1a2a3a4 b1b2b3b4 02 00 00000006 0000000000000032 0000000000000004 0000000000000009"},
		{&Snapshot{testPart, SnapshotMetadata, 6, 0, 0, 0}, []byte{},
			"0002 a1a2a3a4 b1b2b3b4 01 00 00000006 0000000000000000 0000000000000000 0000000000000000"},
		{&CatchupDone{testPart, replica.Point{Epoch: 3, Index: 17}, 16}, nil,
			"0002 a1a2a3a4 b1b2b3b4 00000003 0000000000000011 0000000000000010"},
		{&CatchupAck{testTransfer, 1 << 40}, nil, "0002 a1a2a3a4 0000010000000000"},
		{&CatchupCancel{testTransfer, "full"}, nil, "0002 a1a2a3a4 0004 66756c6c"},
		{&Behind{testTransfer, 7, replica.Point{Epoch: 5, Index: 7}, replica.Point{Epoch: 6, Index: 8}}, nil,
			"0002 a1a2a3a4 00000007 00000005 0000000000000007 00000006 0000000000000008"},
	}
}

func TestFrame_BytesAreFrozen(t *testing.T) {
	head := make([]byte, HeaderLen)
	body := unhex(t, "0102 0000 00000009 00000007 00000008 1122334455667788 0a0b0c0d0e0f1011")
	PutHeader(head, &Header{Version: 1, Kind: KindAppend, Len: len(body) + 5})
	var sum Hasher
	sum.Seed(0x5EED)
	PutSum(head, sum.Sum(head, body, []byte("round")))
	if want := unhex(t, "b7 01 20 00 00000025 "+frozenSum); !bytes.Equal(head, want) {
		t.Errorf("the header is %x, not %x", head, want)
	}
	h, err := ParseHeader(head)
	if err != nil || h.Version != 1 || h.Kind != KindAppend || h.Flags != 0 || h.Len != 37 {
		t.Errorf("it is parsed as %+v, %v", h, err)
	}
	for _, c := range []struct {
		name string
		got  []byte
		want string
	}{
		{"APPEND", putAppend(&testAppend), "0102 0000 00000009 00000007 00000008 1122334455667788 0a0b0c0d0e0f1011"},
		{"probe", putAppend(&testProbe), "0001 0000 00000009 00000007 00000000 000000000000000c 000000000000000b"},
		{"FLUSHED", putFlushed(&testFlushed), "0003 01 00 00000005 0102030405060708 f1f2f3f4f5f6f7f8"},
		{"REJECT", putReject(&testReject), "0003 05 00 00000005 00000006 00000004 000000000000004d 0000000000000046 0000000000000009"},
		{"MESSAGE", AppendMessage(nil, &testMessage), "08 02 03 01 03 00 0002 01020304 0002 0002 c00000000000000000000000000000cf" +
			"1112131415161718 2122232425262728 00000000b2d05e00 00000003 000000000000001e 000000000000001d 00000002 000000000000001d" +
			"00000004 0000000000000028 0000000000000026 00000005 0000000000000032 000000000000001c 0000000000000025"},
	} {
		if want := unhex(t, c.want); !bytes.Equal(c.got, want) {
			t.Errorf("%s is\n%x, not\n%x", c.name, c.got, want)
		}
	}
	for _, c := range bulkCases() {
		if got, want := c.frame.AppendBody(nil), unhex(t, c.bytes); !bytes.Equal(got, want) {
			t.Errorf("%v is\n%x, not\n%x", c.frame.Kind(), got, want)
		}
	}
}

// frozenSum is the checksum of TestFrame_BytesAreFrozen's frame.
const frozenSum = "7a2e647bb6dddcdf"

func putAppend(a *Append) []byte   { b := make([]byte, AppendLen); PutAppend(b, a); return b }
func putFlushed(f *Flushed) []byte { b := make([]byte, FlushedLen); PutFlushed(b, f); return b }
func putReject(r *Reject) []byte   { b := make([]byte, RejectLen); PutReject(b, r); return b }

func TestDecode_IsTheInverseOfEncode(t *testing.T) {
	var a Append
	payload, err := DecodeAppend(append(putAppend(&testAppend), "round"...), &a)
	if err != nil || a != testAppend || string(payload) != "round" {
		t.Errorf("APPEND: %+v, %q, %v", a, payload, err)
	}
	if payload, err = DecodeAppend(putAppend(&testProbe), &a); err != nil || a != testProbe || len(payload) != 0 {
		t.Errorf("probe: %+v, %q, %v", a, payload, err)
	}
	var f Flushed
	if err := DecodeFlushed(putFlushed(&testFlushed), &f); err != nil || f != testFlushed {
		t.Errorf("FLUSHED: %+v, %v", f, err)
	}
	var r Reject
	if err := DecodeReject(putReject(&testReject), &r); err != nil || r != testReject {
		t.Errorf("REJECT: %+v, %v", r, err)
	}
	for _, want := range []replica.Message{testMessage, {Kind: replica.KindResign, Epoch: 1}} {
		var m replica.Message
		if err := DecodeMessage(AppendMessage(nil, &want), &m); err != nil || !reflect.DeepEqual(m, want) {
			t.Errorf("MESSAGE: %+v, %v", m, err)
		}
	}
	for _, c := range bulkCases() {
		got, payload, err := DecodeBulk(c.frame.Kind(), append(c.frame.AppendBody(nil), c.payload...))
		if err != nil || !reflect.DeepEqual(got, c.frame) || !bytes.Equal(payload, c.payload) || got.Of() != testTransfer {
			t.Errorf("%v: %+v, %q, %v", c.frame.Kind(), got, payload, err)
		}
	}
}

// decodeAny decodes the body of a frame of any kind and returns it encoded again.
func decodeAny(k Kind, b []byte) (again []byte, err error) {
	switch k {
	case KindMessage:
		var m replica.Message
		if err := DecodeMessage(b, &m); err != nil {
			return nil, err
		}
		return AppendMessage(nil, &m), nil
	case KindAppend:
		var a Append
		payload, err := DecodeAppend(b, &a)
		return append(putAppend(&a), payload...), err
	case KindFlushed:
		var f Flushed
		err := DecodeFlushed(b, &f)
		return putFlushed(&f), err
	case KindReject:
		var r Reject
		err := DecodeReject(b, &r)
		return putReject(&r), err
	default:
		f, payload, err := DecodeBulk(k, b)
		if err != nil {
			return nil, err
		}
		return append(f.AppendBody(nil), payload...), nil
	}
}

// bodies returns a good body of every kind.
func bodies(t testing.TB) map[Kind][]byte {
	t.Helper()
	all := map[Kind][]byte{
		KindMessage: AppendMessage(nil, &testMessage), KindAppend: putAppend(&testProbe),
		KindFlushed: putFlushed(&testFlushed), KindReject: putReject(&testReject),
	}
	for _, c := range bulkCases() {
		all[c.frame.Kind()] = append(c.frame.AppendBody(nil), c.payload...)
	}
	for k := range all {
		if again, err := decodeAny(k, all[k]); err != nil || !bytes.Equal(again, all[k]) {
			t.Fatalf("%v: %v", k, err)
		}
	}
	return all
}

func TestDecode_RefusesEveryTruncationAndWhatIsLeftOver(t *testing.T) {
	for k, body := range bodies(t) {
		for n := range body {
			fixed := len(body)
			if HasPayload(k) && k != KindAppend {
				if f, payload, err := DecodeBulk(k, body); err == nil {
					fixed -= len(payload)
					if _, snapshot := f.(*Snapshot); snapshot {
						fixed = len(body)
					}
				}
			}
			if n > fixed {
				continue // a shorter payload is another payload
			}
			if _, err := decodeAny(k, body[:n]); !errors.Is(err, ErrBody) {
				t.Errorf("%v cut to %d of %d bytes: %v", k, n, len(body), err)
			}
		}
		if HasPayload(k) {
			continue
		}
		if _, err := decodeAny(k, append(bytes.Clone(body), 0)); !errors.Is(err, ErrBody) {
			t.Errorf("%v with a byte too many: %v", k, err)
		}
	}
}

func TestDecode_RefusesWhatNobodyEncodes(t *testing.T) {
	round := func(a Append) []byte { return append(putAppend(&a), 1) }
	good := testAppend
	with := func(change func(a *Append)) []byte {
		a := good
		change(&a)
		return round(a)
	}
	set := func(b []byte, at int, v byte) []byte { b[at] = v; return b }
	message := func() []byte { return AppendMessage(nil, &testMessage) }
	bulk := func(f BulkFrame, payload string) []byte { return append(f.AppendBody(nil), payload...) }
	for name, c := range map[string]struct {
		kind Kind
		body []byte
	}{
		"APPEND: reserved bytes":             {KindAppend, set(round(good), 3, 1)},
		"APPEND: epoch of the round 0":       {KindAppend, with(func(a *Append) { a.Point.Epoch, a.Prev.Epoch = 0, 0 })},
		"APPEND: round of a later epoch":     {KindAppend, with(func(a *Append) { a.Point.Epoch = 10 })},
		"APPEND: epochs go back":             {KindAppend, with(func(a *Append) { a.Prev.Epoch = 9 })},
		"APPEND: the index overflows":        {KindAppend, with(func(a *Append) { a.Prev.Index = 1<<64 - 1 })},
		"APPEND: a probe with an epoch":      {KindAppend, round(good)[:AppendLen]},
		"FLUSHED: flags":                     {KindFlushed, set(putFlushed(&testFlushed), 2, 2)},
		"REJECT: reserved byte":              {KindReject, set(putReject(&testReject), 3, 1)},
		"MESSAGE: kind 0":                    {KindMessage, set(message(), 0, 0)},
		"MESSAGE: kind of a later version":   {KindMessage, set(message(), 0, 200)},
		"MESSAGE: stage":                     {KindMessage, set(message(), 1, 3)},
		"MESSAGE: reason":                    {KindMessage, set(message(), 2, 9)},
		"MESSAGE: standing":                  {KindMessage, set(message(), 3, 3)},
		"MESSAGE: flags":                     {KindMessage, set(message(), 4, 4)},
		"MESSAGE: reserved byte":             {KindMessage, set(message(), 5, 1)},
		"MESSAGE: more ends than there are":  {KindMessage, set(message(), 12, 255)},
		"FETCH: nothing":                     {KindFetch, bulk(&Fetch{testTransfer, 5, replica.Point{Epoch: 1, Index: 5}}, "")},
		"FETCHED: no payload":                {KindFetched, bulk(&Fetched{testTransfer, replica.Point{}, replica.Point{Epoch: 1, Index: 1}, 0}, "")},
		"FETCHED: a gap":                     {KindFetched, bulk(&Fetched{testTransfer, replica.Point{}, replica.Point{Epoch: 1, Index: 2}, 0}, "x")},
		"FETCH_END: neither true nor false":  {KindFetchEnd, set(bulk(&FetchEnd{testTransfer, true, ""}, ""), 6, 2)},
		"CATCHUP: more than there is":        {KindCatchup, set(bulk(&Catchup{Transfer: testTransfer}, ""), 8, 255)},
		"CATCHUP: reserved byte of a stream": {KindCatchup, set(bulk(&Catchup{Transfer: testTransfer, Positions: make([]Position, 1)}, ""), 13, 1)},
		"CATCHUP: too many":                  {KindCatchup, bulk(&Catchup{Transfer: testTransfer, Positions: make([]Position, MaxPositions+1)}, "")},
		"RECORDS: part 0":                    {KindRecords, bulk(&Records{Part{testTransfer, 0}, Stream{}, 1, 1}, "x")},
		"RECORDS: sequence 0":                {KindRecords, bulk(&Records{testPart, Stream{}, 0, 1}, "x")},
		"RECORDS: none":                      {KindRecords, bulk(&Records{testPart, Stream{}, 1, 0}, "x")},
		"RECORDS: past the last sequence":    {KindRecords, bulk(&Records{testPart, Stream{}, 1<<64 - 2, 3}, "x")},
		"SNAPSHOT: of what":                  {KindSnapshot, bulk(&Snapshot{testPart, 4, 1, 1, 0, 1}, "x")},
		"SNAPSHOT: longer than all of it":    {KindSnapshot, bulk(&Snapshot{testPart, 1, 1, 1, 1, 2}, "xy")},
		"SNAPSHOT: behind its end":           {KindSnapshot, bulk(&Snapshot{testPart, 1, 1, 1, 3, 2}, "x")},
		"CATCHUP_CANCEL: a text too long":    {KindCatchupCancel, append(testTransfer.appendTo(nil), append([]byte{2, 1}, make([]byte, 513)...)...)},
		"a kind that isn't":                  {Kind(99), testTransfer.appendTo(nil)},
	} {
		if _, err := decodeAny(c.kind, c.body); !errors.Is(err, ErrBody) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestParseHeader_RefusesWhatIsNoFrame(t *testing.T) {
	good := make([]byte, HeaderLen)
	PutHeader(good, &Header{Version: 1, Kind: KindPing, Len: MaxBody})
	if h, err := ParseHeader(good); err != nil || h.Len != MaxBody {
		t.Errorf("the largest frame: %+v, %v", h, err)
	}
	for _, c := range []struct {
		at   int
		v    byte
		want error
	}{{0, 0xB6, ErrMagic}, {3, 2, ErrFlags}, {4, 0xFF, ErrLen}} {
		b := bytes.Clone(good)
		b[c.at] = c.v
		if _, err := ParseHeader(b); !errors.Is(err, c.want) {
			t.Errorf("byte %d is %#x: %v", c.at, c.v, err)
		}
	}
}

func TestHasher_EveryBitAndTheSeedCount(t *testing.T) {
	var sum Hasher
	head := make([]byte, HeaderLen)
	PutHeader(head, &Header{Version: 1, Kind: KindAppend, Len: 40})
	body := bytes.Repeat([]byte{0x5A}, 40)
	want := sum.Sum(head, body, nil)
	if got := sum.Sum(head, body[:32], body[32:]); got != want {
		t.Errorf("in two pieces it is %x, not %x", got, want)
	}
	for i := range 8 * (offSum + len(body)) {
		h, b := bytes.Clone(head), bytes.Clone(body)
		if at := i / 8; at < offSum {
			h[at] ^= 1 << (i % 8)
		} else {
			b[at-offSum] ^= 1 << (i % 8)
		}
		if sum.Sum(h, b, nil) == want {
			t.Errorf("bit %d doesn't count", i)
		}
	}
	sum.Seed(1)
	if sum.Sum(head, body, nil) == want {
		t.Error("the seed doesn't count")
	}
}

func TestLane_CarriesItsOwnKindsOnly(t *testing.T) {
	lanes := map[Kind]Lane{KindMessage: Control, KindAppend: Log, KindFlushed: Log, KindReject: Log}
	for _, c := range bulkCases() {
		lanes[c.frame.Kind()] = Bulk
	}
	for k := range kindNames {
		for lane := range Lanes {
			own, ok := lanes[k]
			want := (ok && own == lane) || k == KindPing || k == KindPong
			if lane.Carries(k) != want {
				t.Errorf("lane %v carries %v: %v", lane, k, !want)
			}
		}
	}
	if Control.Carries(0) || Log.Carries(200) || Bulk.Carries(255) || Lanes.Carries(KindFetch) {
		t.Error("a lane carries what is no kind")
	}
}

func TestReason_IsCutWhereItIsTooLong(t *testing.T) {
	long := string(bytes.Repeat([]byte{'x'}, 2*MaxReason))
	f, _, err := DecodeBulk(KindCatchupCancel, (&CatchupCancel{testTransfer, long}).AppendBody(nil))
	if err != nil || f.(*CatchupCancel).Reason != long[:MaxReason] {
		t.Errorf("%v", err)
	}
}

func TestAppendAndFlushed_AllocateNothing(t *testing.T) {
	buf := make([]byte, HeaderLen+AppendLen+4096)
	var sum Hasher
	var a Append
	var f Flushed
	if n := testing.AllocsPerRun(1000, func() {
		PutHeader(buf, &Header{Version: 1, Kind: KindAppend, Len: len(buf) - HeaderLen})
		PutAppend(buf[HeaderLen:], &testAppend)
		PutSum(buf, sum.Sum(buf, buf[HeaderLen:], nil))
		h, err := ParseHeader(buf)
		if err != nil || sum.Sum(buf, buf[HeaderLen:], nil) != h.Sum {
			t.Fatal(err)
		}
		if _, err := DecodeAppend(buf[HeaderLen:], &a); err != nil {
			t.Fatal(err)
		}
		PutFlushed(buf[HeaderLen:], &testFlushed)
		if err := DecodeFlushed(buf[HeaderLen:HeaderLen+FlushedLen], &f); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzBody(f *testing.F) {
	for k, body := range bodies(f) {
		f.Add(uint8(k), body)
	}
	f.Fuzz(func(t *testing.T, k uint8, body []byte) {
		again, err := decodeAny(Kind(k), body)
		if err == nil && !bytes.Equal(again, body) {
			t.Errorf("%v: %x is encoded again as %x", Kind(k), body, again)
		}
	})
}
