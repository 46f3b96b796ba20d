package engine

import (
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/ring"
)

func TestPace_FollowsMostSamplesAndForgivesOne(t *testing.T) {
	var p pace
	if p.add(time.Minute); p.get() != 0 {
		t.Error("something is known from a single sample")
	}
	for range 150 {
		p.add(time.Millisecond)
	}
	for range 100 {
		p.add(time.Millisecond)
	}
	p.add(time.Minute)
	if d := p.get(); d < time.Millisecond || d > 1100*time.Microsecond {
		t.Errorf("%v after a single long one", d)
	}
	for range 60 {
		p.add(20 * time.Millisecond)
	}
	if d := p.get(); d != 20*time.Millisecond {
		t.Errorf("%v when everything takes 20ms", d)
	}
	for range 100 {
		p.add(time.Millisecond)
	}
	if d := p.get(); d != time.Millisecond {
		t.Errorf("%v when everything takes 1ms again", d)
	}
}

func TestJudgePaces_NamesTheNodeThatIsOutOfStep(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name  string
		paces []time.Duration
		was   []bool
		want  []bool
	}{
		{"all alike", []time.Duration{ms, ms, 2 * ms}, []bool{false, false, false}, []bool{false, false, false}},
		{"one of the followers", []time.Duration{ms, 20 * ms, 2 * ms}, []bool{false, false, false}, []bool{false, false, false}},
		{"one of the followers by far", []time.Duration{ms, 21 * ms, 2 * ms}, []bool{false, false, false}, []bool{false, true, false}},
		{"the leader itself", []time.Duration{50 * ms, ms, ms}, []bool{false, false, false}, []bool{true, false, false}},
		{"still slow", []time.Duration{ms, 5 * ms, ms}, []bool{false, true, false}, []bool{false, true, false}},
		{"fast again", []time.Duration{ms, 4 * ms, ms}, []bool{false, true, false}, []bool{false, false, false}},
		{"all are fast enough", []time.Duration{ms / 10, ms, 2 * ms}, []bool{false, false, false}, []bool{false, false, false}},
		{"a distant third", []time.Duration{ms / 10, 30 * ms, 30 * ms}, []bool{false, false, false}, []bool{false, false, false}},
		{"one is not known", []time.Duration{ms, 0, 50 * ms}, []bool{false, false, false}, []bool{false, false, false}},
	} {
		if got := judgePaces(c.paces, c.was); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// lines keeps what is logged.
type lines struct {
	mu   sync.Mutex
	text []string
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, string(b))
	return len(b), nil
}

// has tells whether a line has all of the parts.
func (l *lines) has(parts ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.text, func(line string) bool {
		return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) })
	})
}

// A follower's disk is slow: the others carry the quorum, and the leader says whose disk it is.
func TestNode_ASlowDiskIsNamed(t *testing.T) {
	t.Parallel()
	said := &lines{}
	f := map[int]*faults{1: {}, 2: {}, 3: {}}
	c := newTrio(t, func(o *NodeOptions) {
		o.Engine.OpenDevice = f[int(o.Self)].open(t)
		o.Engine.Logger = slog.New(slog.NewTextHandler(said, &slog.HandlerOptions{Level: slog.LevelInfo}))
	})
	topic := c.declare("orders", 1)
	n := 0
	publish := func() {
		n++
		c.commit(protocol.Pub{TopicID: topic.TopicID, ProducerID: 9, ProducerSeq: uint64(n), Value: []byte("m")})
	}
	began := time.Now()
	for range 2 * minSamples {
		publish()
	}
	took := time.Since(began) / (2 * minSamples) // a publish, with the write of one of the others
	slow, _ := followers(c.leader())
	name := `slow_node=` + c.nodes[slow].opts.Nodes[slow-1].Name
	var mu sync.Mutex
	f[int(slow)].set(func(op *ring.Op) error {
		if op.Kind == ring.WriteSync && op.Inline {
			mu.Lock()
			d := 30 * took
			mu.Unlock()
			time.Sleep(min(d, time.Second))
		}
		return nil
	})
	c.eventually("the slow disk is named", func() bool {
		at := time.Now()
		for range 20 {
			publish()
		}
		mu.Lock()
		took = min(took, time.Since(at)/20)
		mu.Unlock()
		return said.has("takes much longer than the others", name)
	})
	leader := c.nodes[c.leader()].Engine()
	if list := leader.shards[0].repl.replicas(); len(list) != 3 || list[0].Pace == 0 || list[0].LagBytes != 0 {
		t.Errorf("the leader tells of %+v", list)
	}
	f[int(slow)].set(nil)
	c.eventually("it is as fast as the others again", func() bool {
		publish()
		return said.has("as soon as the others again", name)
	})
}
