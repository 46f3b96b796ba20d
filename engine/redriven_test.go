package engine

import (
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

func TestEngine_RedrivenFlagComesBackWithTheMessage(t *testing.T) {
	o := testOptions(t.TempDir())
	e := mustOpen(t, o)
	p := newPeer(t, e)
	topic := p.declare("t", 1).TopicID
	for i := range uint16(4) {
		req := p.send(protocol.Pub{TopicID: topic, Value: []byte{byte(i)}, Flags: i % 2 * protocol.PubFlagRedriven})
		flush(p.in)
		if _, err := p.result(req); err != nil {
			t.Fatal(err)
		}
	}
	check := func(group string) {
		r := newPeer(t, e).subscribe(group, topic)
		for i := range uint16(4) {
			if m := r.next(); m.Flags != i%2*protocol.MsgFlagRedriven {
				t.Errorf("message %d has flags %#x", m.Sequence, m.Flags)
			}
		}
	}
	check("g")
	mustClose(t, e)
	e = mustOpen(t, o)
	defer mustClose(t, e)
	check("h")
}
