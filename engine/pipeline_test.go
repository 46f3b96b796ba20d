package engine

import (
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// Of a pipeline of publishes of one producer the seventh gets an error: those behind it are refused too, and nothing of them is
// stored until the seventh is.
func TestEngine_NothingOfAPipelineIsStoredBehindAnError(t *testing.T) {
	t.Parallel()
	e := mustOpen(t, testOptions(t.TempDir()))
	defer mustClose(t, e)
	p := newPeer(t, e)
	topic := p.declare("t", 1).TopicID
	const last, bad = 100, 7
	send := func(from int, spoil bool) (reqs []uint64) {
		for n := from; n <= last; n++ {
			m := protocol.Pub{TopicID: topic, ProducerID: 5, ProducerSeq: uint64(n), Value: []byte{byte(n)}}
			if spoil && n == bad {
				m.Partition = 9 // of one
			}
			reqs = append(reqs, p.send(m))
		}
		flush(p.in)
		return reqs
	}
	for i, req := range send(1, true) {
		res, err := p.result(req)
		switch n := i + 1; {
		case n < bad && (err != nil || res.Sequence != uint64(n)):
			t.Errorf("publish %d: %+v, %v", n, res, err)
		case n == bad && err == nil:
			t.Errorf("publish %d, which is for no partition, got %+v", n, res)
		case n > bad && code(err) != protocol.CodeSeqGap:
			t.Errorf("publish %d: %+v, %v, want 0x0010", n, res, err)
		}
	}
	for i, req := range send(bad, false) {
		if res, err := p.result(req); err != nil || res.Sequence != uint64(bad+i) {
			t.Errorf("publish %d, sent again: %+v, %v", bad+i, res, err)
		}
	}
}
