package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// TopicScenario creates and deletes topics, one request at a time, kills the broker meanwhile, and checks that what was
// answered is still so: topics with their id and partition count, deletions, and that no id is ever given twice.
type TopicScenario struct {
	Seed             uint64
	Rounds           int
	LoadMin, LoadMax time.Duration
}

// topicModel is one name's state.
type topicModel struct {
	id         uint16
	partitions uint16
	exists     bool
	// uncertain: a request was sent and not answered.
	uncertain bool
}

type topicRun struct {
	rng    *rand.Rand
	topics map[string]*topicModel
	names  []string
	ids    map[uint16]string
}

// topicNames bounds the names, so that many are deleted and created again.
const topicNames = 60

// Run runs the scenario.
func (s *TopicScenario) Run(ctx context.Context, t Target) error {
	r := &topicRun{rng: rand.New(rand.NewPCG(s.Seed, 0)), topics: map[string]*topicModel{}, ids: map[uint16]string{}}
	for i := range topicNames {
		name := fmt.Sprintf("topic.%d", i)
		r.names = append(r.names, name)
		r.topics[name] = &topicModel{}
	}
	for round := 1; round <= s.Rounds; round++ {
		addr, err := t.Start(ctx)
		if err != nil {
			return fmt.Errorf("seed %d, round %d: %w", s.Seed, round, err)
		}
		after := s.LoadMin + time.Duration(r.rng.Int64N(int64(s.LoadMax-s.LoadMin)+1))
		if err := r.round(addr, after, t.Kill); err != nil {
			return fmt.Errorf("seed %d, round %d: %w", s.Seed, round, errors.Join(err, t.Crashed()))
		}
	}
	return nil
}

func (r *topicRun) round(addr string, after time.Duration, kill func()) error {
	conn, err := harness.Dial(addr, "")
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, name := range r.names {
		if err := r.verify(conn, name); err != nil {
			return err
		}
	}
	killed := make(chan struct{})
	time.AfterFunc(after, func() { kill(); close(killed) })
	for {
		name := r.names[r.rng.IntN(len(r.names))]
		if alive, err := r.change(conn, name); err != nil || !alive {
			<-killed
			return err
		}
	}
}

// verify looks a name up and compares it with what was answered; an uncertain one it settles.
func (r *topicRun) verify(conn *harness.Conn, name string) error {
	t := r.topics[name]
	req := protocol.Declare{Topic: []byte(name), Flags: protocol.DeclareFlagLookup}
	result, err := conn.Request(protocol.OpDeclare, req.AppendFrame(nil))
	if errors.Is(err, protocol.CodeUnknownTopic) {
		if t.exists && !t.uncertain {
			return fmt.Errorf("topic %s with id %d is lost", name, t.id)
		}
		t.exists, t.uncertain = false, false
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up %s: %w", name, err)
	}
	var res protocol.DeclareResult
	if err := res.Decode(result); err != nil {
		return err
	}
	switch {
	case !t.exists && !t.uncertain:
		return fmt.Errorf("topic %s exists with id %d, though it was deleted or never created", name, res.TopicID)
	case t.exists && (res.TopicID != t.id || res.Partitions != t.partitions):
		return fmt.Errorf("topic %s has id %d and %d partitions, it was created with %d and %d", name, res.TopicID, res.Partitions, t.id, t.partitions)
	case !t.exists:
		if err := r.created(name, &res); err != nil {
			return err
		}
	}
	t.exists, t.uncertain = true, false
	return nil
}

// created notes a new topic; its id must be a new one.
func (r *topicRun) created(name string, res *protocol.DeclareResult) error {
	if was, used := r.ids[res.TopicID]; used {
		return fmt.Errorf("topic %s got id %d, which %s had before", name, res.TopicID, was)
	}
	r.ids[res.TopicID] = name
	t := r.topics[name]
	t.id, t.partitions = res.TopicID, res.Partitions
	return nil
}

// change creates the topic, or deletes it. alive is false when the connection broke.
func (r *topicRun) change(conn *harness.Conn, name string) (alive bool, err error) {
	t := r.topics[name]
	req := protocol.Declare{Topic: []byte(name), Partitions: uint16(1 + r.rng.IntN(4))}
	if t.exists {
		req = protocol.Declare{Topic: []byte(name), Flags: protocol.DeclareFlagDelete}
	}
	t.uncertain = true
	result, err := conn.Request(protocol.OpDeclare, req.AppendFrame(nil))
	if _, refused := protocol.CodeOf(err); refused {
		return true, fmt.Errorf("declare %s: %w", name, err)
	} else if err != nil {
		return false, nil
	}
	var res protocol.DeclareResult
	if err := res.Decode(result); err != nil {
		return true, err
	}
	if !t.exists {
		if err := r.created(name, &res); err != nil {
			return true, err
		}
	}
	t.exists, t.uncertain = !t.exists, false
	return true, nil
}
