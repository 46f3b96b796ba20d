package crash

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	// producerWindow bounds a producer's unanswered publishes; sendBatch what one write carries.
	producerWindow = 128
	sendBatch      = 16
	// answeredAgain is how many messages that were answered already a producer sends once more after a restart.
	answeredAgain = 3
	retryPause    = 5 * time.Millisecond
)

// producer publishes on one connection to all partitions. A plain one has no identity on the wire and never retries.
type producer struct {
	m     *model
	id    uint64
	topic uint16
	parts int
	rng   *rand.Rand
	conn  *harness.Conn
	// patience bounds how long the producer keeps trying when the broker refuses it for the moment.
	patience time.Duration
}

func (p *producer) plain() bool { return p.id&plainBit != 0 }

func (p *producer) frame(dst []byte, part uint16, o origin) []byte {
	key, value := p.m.content(part, o)
	id, seq := o.wire()
	pub := protocol.Pub{TopicID: p.topic, Partition: part, ProducerID: id, ProducerSeq: seq, Key: key, Value: value}
	return pub.AppendFrame(dst)
}

type sent struct {
	part uint16
	o    origin
}

// answer reads one answer. A refusal is returned as an error that wraps its code.
func (p *producer) answer(s sent) error {
	f, err := p.conn.Next()
	if err != nil {
		return err
	}
	if err := f.Err(); err != nil {
		return err
	}
	var ok protocol.OKFrame
	var res protocol.PubResult
	if f.Op != protocol.OpOK {
		return fmt.Errorf("%v in place of an answer to PUB", f.Op)
	}
	if err := errors.Join(ok.Decode(f.Payload), res.Decode(ok.Result)); err != nil {
		return err
	}
	p.m.acknowledged(s.part, s.o, &res)
	return nil
}

// resume sends again whatever was not answered, and some of what was, until everything is acknowledged.
func (p *producer) resume() error {
	if p.plain() {
		return nil
	}
	deadline := time.Now().Add(p.patience)
	for {
		var list []sent
		for _, part := range p.rng.Perm(p.parts) {
			for _, o := range p.m.unanswered(p.id, uint16(part), answeredAgain) {
				list = append(list, sent{uint16(part), o})
			}
		}
		refused, err := p.exchange(list)
		if err != nil {
			return fmt.Errorf("producer %#x, retry: %w", p.id, err)
		}
		if refused == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("producer %#x is refused for %v: %w", p.id, p.patience, refused)
		}
		time.Sleep(retryPause)
	}
}

// exchange sends messages and reads their answers. refused is a refusal that may pass; err is anything else.
func (p *producer) exchange(list []sent) (refused, err error) {
	for len(list) > 0 {
		batch := list[:min(len(list), producerWindow)]
		list = list[len(batch):]
		var frames []byte
		for _, s := range batch {
			frames = p.frame(frames, s.part, s.o)
		}
		var write sync.WaitGroup
		var writeErr error
		write.Go(func() { writeErr = p.conn.Send(frames) }) // answers must be read meanwhile
		for _, s := range batch {
			if err := p.answer(s); passing(err) {
				refused = err
			} else if err != nil {
				p.conn.Close() // ends the write
				write.Wait()
				return nil, fmt.Errorf("message %d in partition %d: %w", s.o.n, s.part, err)
			}
		}
		if write.Wait(); writeErr != nil {
			return nil, writeErr
		}
	}
	return refused, nil
}

// passing tells whether err is a refusal that waiting and sending again in order cures.
func passing(err error) bool {
	code, ok := protocol.CodeOf(err)
	return ok && (code.Retriable() || code == protocol.CodeSeqGap)
}

// mark publishes one more message to every partition and waits for the answers: the log reaches at least that far.
func (p *producer) mark() error {
	for part := range p.parts {
		p.m.send(p.id, uint16(part))
	}
	return p.resume()
}

// load publishes pipelined until the broker is gone or stop is closed. An error is a broken promise; that the connection
// breaks is expected.
func (p *producer) load(stop <-chan struct{}) error {
	for {
		refused, err := p.stream(stop)
		if err != nil || refused == nil {
			return err
		}
		select {
		case <-stop:
			return nil
		case <-time.After(retryPause):
		}
		if err := p.resume(); err != nil {
			return nil // the broker went away meanwhile; what was not answered is sent again after the restart
		}
	}
}

// stream publishes until the connection breaks, stop is closed, or the broker refuses something for the moment.
func (p *producer) stream(stop <-chan struct{}) (refused, err error) {
	queue := make(chan sent, producerWindow)
	quit := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(queue)
		for {
			n := 1 + p.rng.IntN(sendBatch)
			var frames []byte
			var batch []sent
			for range n {
				part := uint16(p.rng.IntN(p.parts))
				s := sent{part, p.m.send(p.id, part)}
				frames = p.frame(frames, part, s.o)
				batch = append(batch, s)
			}
			for _, s := range batch {
				select {
				case queue <- s:
				case <-quit:
					return
				}
			}
			if p.conn.Send(frames) != nil {
				return
			}
			select {
			case <-stop:
				return
			case <-quit:
				return
			default:
			}
		}
	})
	broken := false
	for s := range queue {
		if broken {
			continue
		}
		switch err2 := p.answer(s); {
		case err2 == nil:
		case passing(err2):
			if refused == nil {
				refused = err2
				close(quit)
			}
		default:
			if code, ok := protocol.CodeOf(err2); ok {
				err = fmt.Errorf("producer %#x: message %d in partition %d was refused: %w (%#x)", p.id, s.o.n, s.part, err2, uint16(code))
			}
			broken = true
			p.conn.Close()
		}
	}
	wg.Wait()
	return refused, err
}
