package protocol

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"reflect"
	"testing"
)

func randomBytes(rng *rand.Rand, lo, hi int) []byte {
	b := make([]byte, lo+rng.IntN(hi-lo+1))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

func randomCodec(rng *rand.Rand, op Op) codec {
	u16, u32, u64 := func() uint16 { return uint16(rng.Uint32()) }, rng.Uint32, rng.Uint64
	switch op {
	case OpConnect:
		return &Connect{Version: uint8(u32()), Token: randomBytes(rng, 0, 300)}
	case OpDeclare:
		m := &Declare{Topic: randomBytes(rng, 0, 300), Partitions: u16(), Flags: uint16(rng.IntN(3)) | uint16(rng.IntN(2))<<2}
		if m.Flags&DeclareFlagSettings != 0 {
			m.Settings = randomBytes(rng, 0, 1000)
		}
		if rng.IntN(2) == 0 {
			m.Flags |= DeclareFlagGroup
			m.Group, m.StartPolicy = randomBytes(rng, 1, MaxGroupLen), StartPolicy(rng.IntN(2))
			if m.Flags == DeclareFlagGroup|DeclareFlagSettings && rng.IntN(2) == 0 {
				m.Flags |= DeclareFlagUpdate
			}
			if m.Flags == DeclareFlagGroup && rng.IntN(2) == 0 {
				m.Flags |= DeclareFlagReset
				m.Reset = Reset{To: ResetTo(rng.IntN(4)), Value: u64(), Partition: u16(), Options: uint8(rng.IntN(4))}
			}
		}
		return m
	case OpPub:
		return &Pub{TopicID: u16(), Partition: u16(), ProducerID: u64(), ProducerSeq: u64(), Flags: uint16(rng.IntN(8)),
			Key: randomBytes(rng, 0, MaxKeyLen), Value: randomBytes(rng, 0, 2000)}
	case OpSub:
		m := &Sub{Group: randomBytes(rng, 1, MaxGroupLen), TopicID: u16(), Partition: AnyPartition,
			StartPolicy: StartPolicy(rng.IntN(2)), CreditCount: u16(), CreditBytes: u32(), Flags: u16() & subFlags}
		if m.Flags&SubFlagRejoin != 0 {
			m.MemberID = u64()
		}
		if m.Flags&SubFlagSettings != 0 {
			m.Settings = randomBytes(rng, 0, 1000)
		}
		return m
	case OpAck:
		return &Ack{SubscriptionID: u16(), TopicID: u16(), Partition: u16(), Sequence: u64(), DeliveryID: u64(),
			OwnershipEpoch: u64(), Flags: u16() & ackFlags}
	case OpNack:
		return &Nack{SubscriptionID: u16(), TopicID: u16(), Partition: u16(), Sequence: u64(), DeliveryID: u64(),
			OwnershipEpoch: u64(), Reason: NackReason(rng.IntN(3))}
	case OpErr:
		return &ErrFrame{Code: ErrorCode(u16()), RequestOp: Op(u16()), Message: randomBytes(rng, 0, MaxErrMessage)}
	case OpOK:
		return &OKFrame{RequestOp: Op(u16()), Result: randomBytes(rng, 0, 100)}
	case OpMsg:
		return &Msg{SubscriptionID: u16(), TopicID: u16(), Partition: u16(), Sequence: u64(), DeliveryID: u64(),
			Attempt: u16(), OwnershipEpoch: u64(), ProducerID: u64(), ProducerSeq: u64(), Flags: u16(),
			Key: randomBytes(rng, 0, MaxKeyLen), Value: randomBytes(rng, 0, 2000)}
	case OpPull:
		m := &Pull{SubscriptionID: u16(), MemberID: u64(), MembershipEpoch: u32(), AssignmentEpoch: u32(),
			OwnershipEpochs: make([]uint64, rng.IntN(20)), MaxMsgs: u16(), MaxBytes: u32(), WaitMs: u16(), MinBytes: u32()}
		for i := range m.OwnershipEpochs {
			m.OwnershipEpochs[i] = u64()
		}
		return m
	case OpHeartbeat:
		return &Heartbeat{SubscriptionID: u16(), MemberID: u64(), MembershipEpoch: u32(), AssignmentEpoch: u32(),
			State: MemberState(rng.IntN(2))}
	case OpNotice:
		return &Notice{NoticeID: u64(), Kind: NoticeKind(rng.IntN(2)), GroupID: u16(), MembershipEpoch: u32(),
			AssignmentEpoch: u32(), OwnershipEpoch: u64(), TopicID: u16(), Partition: u16(), MemberID: u64()}
	case OpControlAck:
		return &ControlAck{NoticeID: u64(), Kind: NoticeKind(rng.IntN(2)), GroupID: u16(), MembershipEpoch: u32(),
			AssignmentEpoch: u32(), OwnershipEpoch: u64(), Result: ControlResult(rng.IntN(3))}
	case OpCredit:
		return &Credit{SubscriptionID: u16(), MembershipEpoch: u32(), OwnershipEpoch: u64(), Mode: CreditMode(rng.IntN(2)),
			Count: u16(), Bytes: u32()}
	case OpPing:
		return nil
	}
	return nil
}

// equal compares payload structs; an absent list and an empty one are the same on the wire.
func equal(a, b codec) bool {
	if p, ok := a.(*Pull); ok && len(p.OwnershipEpochs) == 0 {
		p.OwnershipEpochs = nil
	}
	if p, ok := b.(*Pull); ok && len(p.OwnershipEpochs) == 0 {
		p.OwnershipEpochs = nil
	}
	return reflect.DeepEqual(a, b)
}

func TestCodecs_DecodeIsTheInverseOfEncode(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 7))
		for op := OpConnect; op <= OpCredit; op++ {
			want := randomCodec(rng, op)
			if want == nil {
				continue
			}
			prefix := randomBytes(rng, 0, 9)
			frame := want.AppendFrame(bytes.Clone(prefix))
			if !bytes.HasPrefix(frame, prefix) {
				t.Fatalf("seed %d: %v overwrites what was in dst", seed, op)
			}
			gotOp, payload, n, err := ParseFrame(frame[len(prefix):])
			if err != nil || gotOp != op || n != len(frame)-len(prefix) {
				t.Fatalf("seed %d: %v: ParseFrame = %v, %d of %d, %v", seed, op, gotOp, n, len(frame)-len(prefix), err)
			}
			got := randomCodec(rng, op) // a reused struct must not keep anything
			if err := got.Decode(payload); err != nil {
				t.Fatalf("seed %d: %v: %v", seed, op, err)
			}
			if !equal(got, want) {
				t.Fatalf("seed %d: %v: decoded %+v, want %+v", seed, op, got, want)
			}
		}
	}
}

func TestHotPath_DoesNotAllocate(t *testing.T) {
	frames := golden(t)
	pub, ack, msgPayload := frames["pub"][HeaderSize:], frames["ack"][HeaderSize:], frames["msg"][HeaderSize:]
	pull := frames["pull"][HeaderSize:]
	buf := make([]byte, 0, 4096)
	result := PubResult{Sequence: 1, Durability: DurabilityQuorum}
	msg := Msg{Key: []byte("key"), Value: []byte("value")}
	reused := Pull{OwnershipEpochs: make([]uint64, 0, 8)}
	var failed error
	keep := func(err error) {
		if err != nil {
			failed = err
		}
	}
	for name, f := range map[string]func(){
		"ParseFrame":       func() { _, _, _, err := ParseFrame(frames["pub"]); keep(err) },
		"Pub.Decode":       func() { var m Pub; keep(m.Decode(pub)) },
		"Pub.AppendFrame":  func() { m := Pub{Key: msg.Key, Value: msg.Value}; buf = m.AppendFrame(buf[:0]) },
		"PubResult.Append": func() { buf = result.AppendOK(buf[:0]) },
		"Msg.AppendFrame":  func() { buf = msg.AppendFrame(buf[:0]) },
		"Msg.AppendHeader": func() { buf = msg.AppendHeader(buf[:0], 1000) },
		"Msg.Decode":       func() { var m Msg; keep(m.Decode(msgPayload)) },
		"Ack.Decode":       func() { var m Ack; keep(m.Decode(ack)) },
		"Ack.AppendFrame":  func() { var m Ack; buf = m.AppendFrame(buf[:0]) },
		"Pull.Decode":      func() { keep(reused.Decode(pull)) },
		"AppendOKEmpty":    func() { buf = AppendOKEmpty(buf[:0], OpAck) },
		"AppendErr":        func() { buf = AppendErr(buf[:0], CodeBackpressure, OpPub, "") },
		"Route":            func() { Route(msg.Key, 12) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
	if failed != nil {
		t.Error(failed)
	}
}

func FuzzParseFrame(f *testing.F) {
	for _, frame := range golden(f) {
		f.Add(frame)
	}
	f.Add([]byte{0, 0, 0, 0})
	f.Add([]byte{1, 0, 0, 1, 7})
	f.Fuzz(func(t *testing.T, b []byte) {
		op, payload, n, err := ParseFrame(b)
		total, ok, lenErr := FrameLen(b)
		switch {
		case err != nil:
			if n != 0 || payload != nil || !(errors.Is(err, CodeBadLength) || errors.Is(err, CodeUnknownOp)) {
				t.Fatalf("n = %d, payload %d, %v", n, len(payload), err)
			}
			if errors.Is(err, CodeBadLength) != (lenErr != nil) {
				t.Fatalf("ParseFrame and FrameLen disagree: %v, %v", err, lenErr)
			}
		case n == 0:
			if ok && total <= len(b) {
				t.Fatalf("a complete frame of %d bytes in %d was not taken", total, len(b))
			}
		default:
			if !ok || n != total || len(payload) != n-HeaderSize || !op.Valid() {
				t.Fatalf("op %v, payload %d, n %d, total %d", op, len(payload), n, total)
			}
		}
	})
}

// FuzzDecode feeds a payload to the decoder of its op: it never panics, and what it accepts encodes to the same bytes.
func FuzzDecode(f *testing.F) {
	for _, frame := range golden(f) {
		f.Add(frame[LengthSize], frame[HeaderSize:])
	}
	f.Fuzz(func(t *testing.T, b byte, payload []byte) {
		op := Op(b)
		m := newCodec(op)
		if m == nil {
			return
		}
		if err := m.Decode(payload); err != nil {
			if !errors.Is(err, CodeMalformedPayload) || err.Error() == "" {
				t.Fatalf("%v: %v", op, err)
			}
			return
		}
		if again := m.AppendFrame(nil); !bytes.Equal(again[HeaderSize:], payload) || again[LengthSize] != b {
			t.Fatalf("%v: % x encodes again as % x", op, payload, again)
		}
		if ok, isOK := m.(*OKFrame); isOK {
			r := newResult(ok.RequestOp)
			if r == nil || r.Decode(ok.Result) != nil {
				return
			}
			if again := r.AppendOK(nil); !bytes.Equal(again[HeaderSize:], payload) {
				t.Fatalf("result of %v: % x encodes again as % x", ok.RequestOp, payload, again)
			}
		}
	})
}

func FuzzValidateTopic(f *testing.F) {
	f.Add([]byte("orders.eu"))
	f.Add([]byte("$dlq.x"))
	f.Add([]byte("a..b"))
	f.Fuzz(func(t *testing.T, name []byte) {
		if err := ValidateTopic(name); err == nil && (len(name) == 0 || len(name) > MaxTopicLen || name[0] == '$' || ValidateLookup(name) != nil) {
			t.Fatalf("accepted %q", name)
		}
	})
}

func BenchmarkPubDecode(b *testing.B) {
	payload := golden(b)["pub"][HeaderSize:]
	var m Pub
	for b.Loop() {
		if err := m.Decode(payload); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPubResultAppend(b *testing.B) {
	buf := make([]byte, 0, 128)
	m := PubResult{Sequence: 1}
	for b.Loop() {
		buf = m.AppendOK(buf[:0])
	}
}

func BenchmarkMsgAppend(b *testing.B) {
	buf := make([]byte, 0, 1024)
	m := Msg{Key: []byte("key"), Value: make([]byte, 100)}
	for b.Loop() {
		buf = m.AppendFrame(buf[:0])
	}
}
