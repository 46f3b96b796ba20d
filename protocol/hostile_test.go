package protocol

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

// decodePayload decodes what op carries, the result inside an OK included.
func decodePayload(op Op, payload []byte) error {
	if op == OpPing {
		return DecodePing(payload)
	}
	m := newCodec(op)
	if err := m.Decode(payload); err != nil {
		return err
	}
	if ok, isOK := m.(*OKFrame); isOK {
		if result := newResult(ok.RequestOp); result != nil {
			return result.Decode(ok.Result)
		}
	}
	return nil
}

func TestParseFrame_AsksForMoreAtEveryCut(t *testing.T) {
	for name, frame := range golden(t) {
		for cut := range frame {
			_, _, n, err := ParseFrame(frame[:cut])
			if n != 0 || err != nil {
				t.Fatalf("%s cut at %d: n = %d, %v", name, cut, n, err)
			}
			total, ok, err := FrameLen(frame[:cut])
			if ok != (cut >= LengthSize) || err != nil || (ok && total != len(frame)) {
				t.Fatalf("%s cut at %d: FrameLen = %d, %v, %v", name, cut, total, ok, err)
			}
		}
		op, payload, n, err := ParseFrame(append(bytes.Clone(frame), "next"...))
		if err != nil || n != len(frame) || !bytes.Equal(payload, frame[HeaderSize:]) || byte(op) != frame[LengthSize] {
			t.Fatalf("%s: ParseFrame = %v, % x, %d, %v", name, op, payload, n, err)
		}
		if cap(payload) != len(payload) {
			t.Fatalf("%s: the payload's capacity reaches into the next frame", name)
		}
	}
}

func TestParseFrame_RefusesBadLengths(t *testing.T) {
	for _, prefix := range []string{"\x00\x00\x00\x00", "\x01\x00\x00\x01", "\xff\xff\xff\xff", "\x00\x00\x00\x00\x07"} {
		if _, _, n, err := ParseFrame([]byte(prefix)); n != 0 || !errors.Is(err, CodeBadLength) {
			t.Errorf("ParseFrame(% x): n = %d, %v", prefix, n, err)
		}
		if _, ok, err := FrameLen([]byte(prefix)); ok || !errors.Is(err, CodeBadLength) {
			t.Errorf("FrameLen(% x): %v, %v", prefix, ok, err)
		}
	}
	largest := make([]byte, MaxFrameSize)
	copy(largest, "\x01\x00\x00\x00\x09")
	if _, payload, n, err := ParseFrame(largest); err != nil || n != MaxFrameSize || len(payload) != MaxFrameLen-1 {
		t.Errorf("the largest frame: n = %d, %v", n, err)
	}
}

func TestParseFrame_RefusesUnknownOpsAsSoonAsTheyAreSeen(t *testing.T) {
	for b := range 256 {
		op := Op(b)
		known := b >= 0x01 && b <= 0x0F
		if op.Valid() != known {
			t.Fatalf("Op(0x%02X).Valid() = %v", b, op.Valid())
		}
		_, _, n, err := ParseFrame([]byte{0, 0, 0, 9, byte(b)})
		if n != 0 || errors.Is(err, CodeUnknownOp) == known {
			t.Errorf("op 0x%02X: n = %d, %v", b, n, err)
		}
	}
}

func TestDecode_RefusesEveryTruncationAndATrailingByte(t *testing.T) {
	for name, frame := range golden(t) {
		op, payload, _, _ := ParseFrame(frame)
		check := func(what string, p []byte) {
			t.Helper()
			err := decodePayload(op, p)
			var bad *PayloadError
			if !errors.Is(err, CodeMalformedPayload) || !errors.As(err, &bad) {
				t.Errorf("%s %s: %v", name, what, err)
				return
			}
			if bad.Op != op || bad.Field == "" || bad.Offset > len(p) || !strings.Contains(err.Error(), op.String()) {
				t.Errorf("%s %s: the error does not say where: %+v", name, what, bad)
			}
		}
		for cut := range payload {
			check("truncated", payload[:cut])
		}
		check("with a trailing byte", append(bytes.Clone(payload), 0))
	}
	for name, want := range goldenResults {
		var ok OKFrame
		if err := ok.Decode(want.AppendOK(nil)[HeaderSize:]); err != nil {
			t.Fatal(err)
		}
		for cut := range ok.Result {
			if err := newResult(ok.RequestOp).Decode(ok.Result[:cut]); !errors.Is(err, CodeMalformedPayload) {
				t.Errorf("result of %s cut at %d: %v", name, cut, err)
			}
		}
		if err := newResult(ok.RequestOp).Decode(append(bytes.Clone(ok.Result), 0)); !errors.Is(err, CodeMalformedPayload) {
			t.Errorf("result of %s with a trailing byte: %v", name, err)
		}
	}
	if err := DecodeEmptyResult(OpAck, []byte{1}); !errors.Is(err, CodeMalformedPayload) {
		t.Errorf("an ACK's result that is not empty: %v", err)
	}
}

// TestDecode_RefusesWhatBreaksABound changes one field of a frozen frame at a time.
func TestDecode_RefusesWhatBreaksABound(t *testing.T) {
	long := func(n int) []byte { return bytes.Repeat([]byte{'x'}, n) }
	key16 := func(n int) string { return string([]byte{byte(n >> 8), byte(n)}) + string(long(n)) }
	cases := []struct {
		name, field string
		op          Op
		payload     string
	}{
		{"CONNECT flags", "client_flags", OpConnect, "\x01\x00\x01\x00\x00\x00\x00\x00\x00"},
		{"CONNECT reserved", "reserved", OpConnect, "\x01\x00\x00\x00\x00\x00\x00\x00\x01"},
		{"DECLARE unknown flag", "flags", OpDeclare, "\x00\x01t\x00\x01\x00\x40"},
		{"DECLARE reset of a topic", "flags", OpDeclare, "\x00\x01t\x00\x01\x00\x20" + string(long(12))},
		{"DECLARE reset without tail", "reset_to", OpDeclare, "\x00\x01t\x00\x01\x00\x28\x00\x01g\x00"},
		{"DECLARE reset to 4", "reset_to", OpDeclare, "\x00\x01t\x00\x01\x00\x28\x00\x01g\x00\x04" + string(long(11))},
		{"DECLARE reset options", "reset_options", OpDeclare, "\x00\x01t\x00\x01\x00\x28\x00\x01g\x00\x00" + string(long(10)) + "\x04"},
		{"DECLARE group flag without tail", "group_len", OpDeclare, "\x00\x01t\x00\x01\x00\x08"},
		{"DECLARE empty group", "group", OpDeclare, "\x00\x01t\x00\x01\x00\x08\x00\x00\x00"},
		{"DECLARE group start policy", "start_policy", OpDeclare, "\x00\x01t\x00\x01\x00\x08\x00\x01g\x02"},
		{"DECLARE update of a topic", "flags", OpDeclare, "\x00\x01t\x00\x01\x00\x14\x00\x02{}"},
		{"DECLARE update without settings", "flags", OpDeclare, "\x00\x01t\x00\x01\x00\x18\x00\x01g\x00"},
		{"DECLARE delete and lookup", "flags", OpDeclare, "\x00\x01t\x00\x01\x00\x03"},
		{"DECLARE settings flag without tail", "settings_len", OpDeclare, "\x00\x01t\x00\x01\x00\x04"},
		{"DECLARE tail without its flag", "end", OpDeclare, "\x00\x01t\x00\x01\x00\x00\x00\x00"},
		{"PUB unknown flag", "flags", OpPub, "\x00\x01\x00\x01" + string(long(16)) + "\x00\x08\x00\x00\x00\x00\x00\x00"},
		{"PUB key of 256", "key", OpPub, "\x00\x01\x00\x01" + string(long(16)) + "\x00\x00" + key16(256) + "\x00\x00\x00\x00"},
		{"PUB value length above the cap", "value", OpPub, "\x00\x01\x00\x01" + string(long(16)) + "\x00\x00\x00\x00\x00\xff\xfc\x01"},
		{"PUB value length of 4 GiB", "value", OpPub, "\x00\x01\x00\x01" + string(long(16)) + "\x00\x00\x00\x00\xff\xff\xff\xff"},
		{"SUB empty group", "group", OpSub, "\x00\x00" + "\x00\x01\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"SUB group of 256", "group", OpSub, key16(256) + "\x00\x01\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"SUB partition", "partition", OpSub, "\x00\x01g\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"SUB start policy", "start_policy", OpSub, "\x00\x01g\x00\x01\xff\xff\x02\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"SUB follower flag", "flags", OpSub, "\x00\x01g\x00\x01\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00\x04"},
		{"SUB settings without tail", "settings_len", OpSub, "\x00\x01g\x00\x01\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00\x10"},
		{"SUB rejoin without tail", "member_id", OpSub, "\x00\x01g\x00\x01\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00\x08"},
		{"ACK unknown flag", "flags", OpAck, string(long(30)) + "\x00\x04"},
		{"NACK reason 3", "reason", OpNack, string(long(30)) + "\x03\x00\x00"},
		{"NACK flags", "flags", OpNack, string(long(30)) + "\x00\x00\x01"},
		{"ERR message of 513", "message", OpErr, "\x00\x08\x03" + key16(513)},
		{"OK result longer than the payload", "result", OpOK, "\x03\xff\xff\xff\xff"},
		{"MSG key of 256", "key", OpMsg, string(long(48)) + "\x00\x00" + key16(256) + "\x00\x00\x00\x00"},
		{"MSG value length above the cap", "value", OpMsg, string(long(48)) + "\x00\x00\x00\x00\x00\xff\xff\x01"},
		{"PULL epochs that are not there", "ownership_epochs", OpPull, string(long(18)) + "\xff\xff" + string(long(12))},
		{"HEARTBEAT state", "state", OpHeartbeat, string(long(18)) + "\x02"},
		{"NOTICE kind", "kind", OpNotice, string(long(8)) + "\x02" + string(long(30))},
		{"CONTROL_ACK kind", "notice_kind", OpControlAck, string(long(8)) + "\x02" + string(long(18)) + "\x00"},
		{"CONTROL_ACK result", "result", OpControlAck, string(long(8)) + "\x00" + string(long(18)) + "\x03"},
		{"CREDIT mode", "mode", OpCredit, string(long(14)) + "\x02" + string(long(6)) + "\x00\x00\x00\x00"},
		{"CREDIT reserved", "reserved", OpCredit, string(long(14)) + "\x00" + string(long(6)) + "\x00\x00\x01\x00"},
	}
	for _, c := range cases {
		err := newCodec(c.op).Decode([]byte(c.payload))
		var bad *PayloadError
		if !errors.Is(err, CodeMalformedPayload) || !errors.As(err, &bad) {
			t.Errorf("%s: %v", c.name, err)
		} else if bad.Field != c.field {
			t.Errorf("%s: blames %q, want %q (%v)", c.name, bad.Field, c.field, err)
		}
	}
	if err := new(DeclareResult).Decode([]byte("\x00\x01\x00\x01\x02")); !errors.Is(err, CodeMalformedPayload) {
		t.Errorf("created = 2: %v", err)
	}
	if err := new(PubResult).Decode(append(append(long(8), 4), long(17)...)); !errors.Is(err, CodeMalformedPayload) {
		t.Errorf("durability = 4: %v", err)
	}
}

func TestDecode_AcceptsEachBoundItself(t *testing.T) {
	for _, m := range []codec{
		&Pub{Key: make([]byte, MaxKeyLen), Value: make([]byte, MaxValueLen)},
		&Msg{Key: make([]byte, MaxKeyLen), Value: make([]byte, MaxMsgValueLen)},
		&Sub{Group: make([]byte, MaxGroupLen), Partition: AnyPartition},
		&ErrFrame{Message: make([]byte, MaxErrMessage)},
		&Declare{Topic: make([]byte, MaxTopicLen), Flags: DeclareFlagSettings, Settings: make([]byte, 65535)},
		&Connect{Token: make([]byte, 65535)},
		&Pull{OwnershipEpochs: make([]uint64, 65535)},
	} {
		op, payload, n, err := ParseFrame(m.AppendFrame(nil))
		if err != nil || n == 0 {
			t.Fatalf("%T: n = %d, %v", m, n, err)
		}
		if err := newCodec(op).Decode(payload); err != nil {
			t.Errorf("%T: %v", m, err)
		}
	}
}

func TestPull_DecodeAllocatesForWhatIsThereOnly(t *testing.T) {
	lie := append(make([]byte, 18), 0xff, 0xff, 0, 0)
	var m Pull
	if err := m.Decode(lie); !errors.Is(err, CodeMalformedPayload) {
		t.Fatal(err)
	}
	if cap(m.OwnershipEpochs) != 0 {
		t.Errorf("a lying count allocated %d elements", cap(m.OwnershipEpochs))
	}
}

func TestAppendErr_CutsTheMessageBetweenRunes(t *testing.T) {
	for _, message := range []string{
		strings.Repeat("x", 2000), strings.Repeat("é", 2000), strings.Repeat("日本", 2000), "x" + strings.Repeat("😀", 2000),
		strings.Repeat("\xff", 2000), "short",
	} {
		_, payload, _, err := ParseFrame(AppendErr(nil, CodeInternal, OpPub, message))
		if err != nil {
			t.Fatal(err)
		}
		var m ErrFrame
		if err := m.Decode(payload); err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(message, string(m.Message)) || len(m.Message) > MaxErrMessage {
			t.Errorf("%.8q: the message is no prefix, or has %d bytes", message, len(m.Message))
		}
		if utf8.ValidString(message) && !utf8.Valid(m.Message) {
			t.Errorf("%.8q was cut inside a rune", message)
		}
		if len(message) > MaxErrMessage && len(m.Message) < MaxErrMessage-3 {
			t.Errorf("%.8q was cut to %d bytes", message, len(m.Message))
		}
	}
}

func TestAppendErr_FillsInTheDefaultText(t *testing.T) {
	_, payload, _, err := ParseFrame(AppendErr(nil, CodeUnknownTopic, OpPub, ""))
	if err != nil {
		t.Fatal(err)
	}
	var m ErrFrame
	if err := m.Decode(payload); err != nil || string(m.Message) != CodeUnknownTopic.Text() {
		t.Errorf("message %q, %v", m.Message, err)
	}
}
