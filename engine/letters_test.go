package engine

import (
	"bytes"
	"testing"

	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
)

func (p *peer) lookup(name string) (protocol.DeclareResult, error) {
	p.t.Helper()
	req := p.c.request()
	d := protocol.Declare{Topic: []byte(name), Flags: protocol.DeclareFlagLookup}
	p.in.Request(p.c, req, protocol.OpDeclare, payloadOf(d.AppendFrame(nil)))
	flush(p.in)
	var res protocol.DeclareResult
	b, err := p.c.answer(p.t, req)
	if err != nil {
		return res, err
	}
	return res, res.Decode(b)
}

func (r *reader) reject(m *protocol.Msg) error {
	r.t.Helper()
	req := r.c.request()
	a := protocol.Nack{SubscriptionID: m.SubscriptionID, TopicID: m.TopicID, Partition: m.Partition, Sequence: m.Sequence,
		DeliveryID: m.DeliveryID, OwnershipEpoch: m.OwnershipEpoch, Reason: protocol.NackReject}
	r.in.Request(r.c, req, protocol.OpNack, payloadOf(a.AppendFrame(nil)))
	flush(r.in)
	_, err := r.c.answer(r.t, req)
	return err
}

// letter decodes a dead letter and compares it with what was published.
func (r *reader) letter(want *protocol.Pub, seq uint64) protocol.Msg {
	r.t.Helper()
	m := r.next()
	var e deadletter.Envelope
	value, err := e.Decode(m.Value)
	if err != nil {
		r.t.Fatal(err)
	}
	if !bytes.Equal(value, want.Value) || !bytes.Equal(m.Key, want.Key) || e.TopicID != want.TopicID || e.Sequence != seq ||
		e.ProducerID != want.ProducerID || e.ProducerSeq != want.ProducerSeq || e.Reason != deadletter.ReasonRejected || e.Attempts != 1 {
		r.t.Fatalf("the letter says %+v, key %.20q, %d bytes", e, m.Key, len(value))
	}
	return m
}

func TestEngine_RejectedMessagesAreDeadLetters(t *testing.T) {
	o := testOptions(t.TempDir())
	o.JournalFileBytes, o.MemoryBytes = 40<<20, 384<<20
	o.Shards = 2
	e := mustOpen(t, o)
	p := newPeer(t, e)
	topic := p.declare("orders.eu", 1).TopicID
	if _, err := p.lookup("$dlq.billing"); code(err) != protocol.CodeUnknownTopic {
		t.Fatalf("the dead-letter topic before its first use: %v", err)
	}
	pubs := []protocol.Pub{
		{TopicID: topic, ProducerID: 9, ProducerSeq: 1, Key: []byte("k"), Value: []byte("poison")},
		{TopicID: topic, Value: nil},
		{TopicID: topic, Key: bytes.Repeat([]byte("k"), protocol.MaxKeyLen), Value: bytes.Repeat([]byte{7}, protocol.MaxValueLen)},
	}
	r := newPeer(t, e).subscribe("billing", topic)
	for i := range pubs {
		req := p.send(pubs[i])
		flush(p.in)
		if _, err := p.result(req); err != nil {
			t.Fatal(err)
		}
		m := r.next()
		if err := r.reject(&m); err != nil {
			t.Fatalf("rejecting message %d: %v", i, err)
		}
	}
	letters, err := p.lookup("$dlq.billing")
	if err != nil || letters.Partitions != 1 {
		t.Fatalf("the dead-letter topic: %+v, %v", letters, err)
	}
	req := p.send(protocol.Pub{TopicID: letters.TopicID, Value: []byte("forged")})
	flush(p.in)
	if _, err := p.result(req); code(err) != protocol.CodeInvalidTopic {
		t.Fatalf("publishing to a dead-letter topic: %v, want 0x000B", err)
	}
	mustClose(t, e)

	e = mustOpen(t, o)
	defer mustClose(t, e)
	// The group reads its own letters and rejects them: no letter of a letter, they stay readable.
	for _, group := range []string{"billing", "other"} {
		r := newPeer(t, e).subscribe(group, letters.TopicID)
		for i := range pubs {
			m := r.letter(&pubs[i], uint64(i+1))
			if err := r.reject(&m); code(err) != protocol.CodeDLQPathOverflow {
				t.Fatalf("rejecting a dead letter: %v, want 0x0030", err)
			}
		}
	}
	if _, err := newPeer(t, e).lookup("$dlq.other"); code(err) != protocol.CodeUnknownTopic {
		t.Fatalf("a dead letter got a dead letter: %v", err)
	}
}

func TestEngine_FullDiskKeepsMessagesWithoutALetter(t *testing.T) {
	t.Parallel()
	f, _, e, p, topic := openFaulty(t)
	defer mustClose(t, e)
	acked, err := p.publishN(topic, 0, 3)
	if err != nil {
		t.Fatal(err)
	}
	r := newPeer(t, e).subscribe("g", topic)
	m := r.next()
	f.free.Store(1 << 20)
	acked, _ = p.publishUntilRefused(topic, acked) // until the free space is looked at
	if err := r.reject(&m); code(err) != protocol.CodeDLQUnavailable {
		t.Fatalf("rejecting on a full disk: %v, want 0x0031", err)
	}
	for i := 2; i <= acked; i++ {
		m := r.next()
		wantValue(t, &m, i)
		if err := r.ack(&m); err != nil {
			t.Fatal(err)
		}
	}
	letters, err := p.lookup("$dlq.g")
	if err != nil {
		t.Fatal(err)
	}
	watch := newPeer(t, e).subscribe("watch", letters.TopicID)
	f.free.Store(0)
	var env deadletter.Envelope
	l := watch.next() // the writing is tried again by itself
	if _, err := env.Decode(l.Value); err != nil || env.Sequence != 1 {
		t.Fatalf("letter %+v, %v", env, err)
	}
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	for rest := r.c.pushed[r.parsed:]; len(rest) > 0; { // a notice may have come twice
		op, _, n, err := protocol.ParseFrame(rest)
		if err != nil || op == protocol.OpMsg {
			t.Fatalf("the message was delivered again: %v, %v", op, err)
		}
		rest = rest[n:]
	}
}
