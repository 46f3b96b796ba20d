package protocol

import (
	"bytes"
	_ "embed"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
)

//go:embed testdata/golden.txt
var goldenText string

// golden returns the frozen frames by name.
func golden(t testing.TB) map[string][]byte {
	t.Helper()
	frames := map[string][]byte{}
	for line := range strings.Lines(goldenText) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		name, digits, ok := strings.Cut(line, ": ")
		frame, err := hex.DecodeString(digits)
		if !ok || err != nil {
			t.Fatalf("bad golden line %q: %v", line, err)
		}
		frames[name] = frame
	}
	return frames
}

// codec is what every payload struct can do.
type codec interface {
	AppendFrame(dst []byte) []byte
	Decode(payload []byte) error
}

// resultCodec is what every result struct can do.
type resultCodec interface {
	AppendOK(dst []byte) []byte
	Decode(result []byte) error
}

// newCodec returns an empty struct for the payload of op, nil for PING.
func newCodec(op Op) codec {
	switch op {
	case OpConnect:
		return new(Connect)
	case OpDeclare:
		return new(Declare)
	case OpPub:
		return new(Pub)
	case OpSub:
		return new(Sub)
	case OpAck:
		return new(Ack)
	case OpNack:
		return new(Nack)
	case OpPing:
		return nil
	case OpErr:
		return new(ErrFrame)
	case OpOK:
		return new(OKFrame)
	case OpMsg:
		return new(Msg)
	case OpPull:
		return new(Pull)
	case OpHeartbeat:
		return new(Heartbeat)
	case OpNotice:
		return new(Notice)
	case OpControlAck:
		return new(ControlAck)
	case OpCredit:
		return new(Credit)
	}
	return nil
}

// newResult returns an empty struct for the result of op, nil where the result is empty.
func newResult(op Op) resultCodec {
	switch op {
	case OpDeclare:
		return new(DeclareResult)
	case OpPub:
		return new(PubResult)
	case OpSub:
		return new(SubResult)
	case OpCredit:
		return new(CreditResult)
	case OpConnect, OpAck, OpNack, OpPing, OpErr, OpOK, OpMsg, OpPull, OpHeartbeat, OpNotice, OpControlAck:
		return nil
	}
	return nil
}

const (
	u1 = 0x1112131415161718
	u2 = 0x2122232425262728
	u3 = 0x3132333435363738
	u4 = 0x4142434445464748
	u5 = 0x5152535455565758
)

var goldenStructs = map[string]codec{
	"connect":               &Connect{Version: 1, Token: []byte("abc")},
	"connect without token": &Connect{Version: 1, Token: []byte{}},
	"declare":               &Declare{Topic: []byte("orders"), Partitions: 12},
	"declare with settings": &Declare{Topic: []byte("orders"), Flags: DeclareFlagSettings, Settings: []byte("{}")},
	"declare group": &Declare{Topic: []byte("orders"), Flags: DeclareFlagGroup | DeclareFlagSettings | DeclareFlagUpdate,
		Settings: []byte("{}"), Group: []byte("billing"), StartPolicy: StartLatest},
	"declare reset": &Declare{Topic: []byte("orders"), Flags: DeclareFlagGroup | DeclareFlagReset, Group: []byte("billing"),
		Reset: Reset{To: ResetTime, Value: u1, Partition: AnyPartition, Options: ResetForce}},
	"declare lookup": &Declare{Topic: []byte("$dlq."), Flags: DeclareFlagLookup},
	"pub": &Pub{TopicID: 0x0102, Partition: 0x0304, ProducerID: 0x05060708090a0b0c, ProducerSeq: 0x0d0e0f1011121314,
		Flags: uint16(DurabilityQuorum), Key: []byte("key"), Value: []byte("value")},
	"pub empty": &Pub{TopicID: 1, Partition: AnyPartition, Key: []byte{}, Value: []byte{}},
	"sub": &Sub{Group: []byte("billing"), TopicID: 0x0102, Partition: AnyPartition, StartPolicy: StartLatest,
		CreditCount: 256, CreditBytes: 2 << 20, Flags: SubFlagStream},
	"sub rejoin": &Sub{Group: []byte("g"), TopicID: 0x0102, Partition: AnyPartition, Flags: SubFlagRejoin, MemberID: u1},
	"sub settings": &Sub{Group: []byte("g"), TopicID: 0x0102, Partition: AnyPartition, Flags: SubFlagSettings | SubFlagRejoin,
		MemberID: u1, Settings: []byte(`{"ordered":true}`)},
	"ack": &Ack{SubscriptionID: 0x0102, TopicID: 0x0304, Partition: 0x0506, Sequence: u1, DeliveryID: u2,
		OwnershipEpoch: u3, Flags: AckFlagCumulative},
	"nack": &Nack{SubscriptionID: 0x0102, TopicID: 0x0304, Partition: 0x0506, Sequence: u1, DeliveryID: u2,
		OwnershipEpoch: u3, Reason: NackReject},
	"err":      &ErrFrame{Code: CodeUnknownTopic, RequestOp: OpPub, Message: []byte("oops")},
	"ok empty": &OKFrame{RequestOp: OpPing, Result: []byte{}},
	"msg": &Msg{SubscriptionID: 0x0102, TopicID: 0x0304, Partition: 0x0506, Sequence: u1, DeliveryID: u2, Attempt: 2,
		OwnershipEpoch: u3, ProducerID: u4, ProducerSeq: u5, Key: []byte("key"), Value: []byte("value")},
	"pull": &Pull{SubscriptionID: 0x0102, MemberID: u1, MembershipEpoch: 0x21222324, AssignmentEpoch: 0x31323334,
		OwnershipEpochs: []uint64{u4, u5}, MaxMsgs: 100, MaxBytes: 1 << 20, WaitMs: 500, MinBytes: 1},
	"pull without epochs": &Pull{SubscriptionID: 0x0102, MemberID: u1, MembershipEpoch: 0x21222324,
		AssignmentEpoch: 0x31323334, MaxMsgs: 100, MaxBytes: 1 << 20, WaitMs: 500, MinBytes: 1},
	"heartbeat": &Heartbeat{SubscriptionID: 0x0102, MemberID: u1, MembershipEpoch: 0x21222324,
		AssignmentEpoch: 0x31323334, State: MemberLeave},
	"notice": &Notice{NoticeID: u1, Kind: NoticeRevoke, GroupID: 0x0102, MembershipEpoch: 0x21222324,
		AssignmentEpoch: 0x31323334, OwnershipEpoch: u4, TopicID: 0x0304, Partition: 0x0506, MemberID: u5},
	"control_ack": &ControlAck{NoticeID: u1, Kind: NoticeRevoke, GroupID: 0x0102, MembershipEpoch: 0x21222324,
		AssignmentEpoch: 0x31323334, OwnershipEpoch: u4, Result: ControlError},
	"credit": &Credit{SubscriptionID: 0x0102, MembershipEpoch: 0x21222324, Mode: CreditAdd, Count: 32, Bytes: 1 << 20},
}

var goldenResults = map[string]resultCodec{
	"ok declare": &DeclareResult{TopicID: 0x0102, Partitions: 12, Existed: true},
	"ok pub": &PubResult{Sequence: u1, Durability: DurabilityQuorum, LeaderEpoch: u2, CommitSeq: u3,
		Flags: ResultFlagDeduplicated},
	"ok sub": &SubResult{SubscriptionID: 0x0102, MemberID: u1, MembershipEpoch: 0x21222324, AssignmentEpoch: 0x31323334},
	"ok credit": &CreditResult{GrantedCount: 256, GrantedBytes: 2 << 20, OutstandingCount: 3,
		OutstandingBytes: 0x00010203, CreditEpoch: u1},
}

func TestGolden_EveryFrameKeepsItsBytes(t *testing.T) {
	seen := map[Op]bool{}
	for name, frame := range golden(t) {
		op, payload, n, err := ParseFrame(frame)
		if err != nil || n != len(frame) {
			t.Fatalf("%s: ParseFrame: n = %d of %d, %v", name, n, len(frame), err)
		}
		seen[op] = true
		switch {
		case name == "ping":
			if got := AppendPing(nil); !bytes.Equal(got, frame) {
				t.Errorf("%s: encoded % x, want % x", name, got, frame)
			}
			if err := DecodePing(payload); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		case goldenStructs[name] != nil:
			want := goldenStructs[name]
			if got := want.AppendFrame(nil); !bytes.Equal(got, frame) {
				t.Errorf("%s: encoded % x, want % x", name, got, frame)
			}
			got := newCodec(op)
			if err := got.Decode(payload); err != nil {
				t.Errorf("%s: %v", name, err)
			} else if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: decoded %+v, want %+v", name, got, want)
			}
		case goldenResults[name] != nil:
			want := goldenResults[name]
			if got := want.AppendOK(nil); !bytes.Equal(got, frame) {
				t.Errorf("%s: encoded % x, want % x", name, got, frame)
			}
			var ok OKFrame
			if err := ok.Decode(payload); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			got := newResult(ok.RequestOp)
			if err := got.Decode(ok.Result); err != nil {
				t.Errorf("%s: %v", name, err)
			} else if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: decoded %+v, want %+v", name, got, want)
			}
		default:
			t.Errorf("%s: no struct to compare with", name)
		}
	}
	for op := OpConnect; op <= OpCredit; op++ {
		if !seen[op] {
			t.Errorf("no frozen frame for %v", op)
		}
	}
}

func TestGolden_TheSpecificationsExamples(t *testing.T) {
	if got, want := AppendPing(nil), "\x00\x00\x00\x01\x07"; string(got) != want {
		t.Errorf("PING is % x, want % x", got, want)
	}
	connect := Connect{Version: WireVersion, Token: []byte("abc")}
	want := "\x00\x00\x00\x0d\x01\x01\x00\x00\x00\x03abc\x00\x00\x00\x00"
	if got := connect.AppendFrame(nil); string(got) != want {
		t.Errorf("CONNECT is % x, want % x", got, want)
	}
}

func TestFrameLengths_MatchWhatIsAppended(t *testing.T) {
	msg := Msg{Key: []byte("abc"), Value: []byte("0123456789")}
	pub := Pub{Key: []byte("abc"), Value: []byte("0123456789")}
	for _, c := range []struct {
		name      string
		got, want int
	}{
		{"MSG header", len(msg.AppendHeader(nil, 10)), MsgHeaderLen(3)},
		{"MSG", len(msg.AppendFrame(nil)), MsgFrameLen(3, 10)},
		{"PUB", len(pub.AppendFrame(nil)), PubFrameLen(3, 10)},
		{"ACK", len(new(Ack).AppendFrame(nil)), AckFrameLen},
		{"empty OK", len(AppendOKEmpty(nil, OpAck)), OKEmptyFrameLen},
		{"DECLARE result", len(new(DeclareResult).AppendOK(nil)), DeclareResultFrameLen},
		{"PUB result", len(new(PubResult).AppendOK(nil)), PubResultFrameLen},
		{"SUB result", len(new(SubResult).AppendOK(nil)), SubResultFrameLen},
		{"CREDIT result", len(new(CreditResult).AppendOK(nil)), CreditResultFrameLen},
	} {
		if c.got != c.want {
			t.Errorf("%s takes %d bytes, want %d", c.name, c.got, c.want)
		}
	}
}
