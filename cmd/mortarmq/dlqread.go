package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/engine/deadletter"
	"github.com/mortarmq/mortarmq/protocol"
)

// lookGroup is how the groups begin that list, show and export read with, each run its own. It is deleted at the end; a
// run that was killed leaves one behind, which does no harm and can be deleted ('mortarmq groups delete').
const lookGroup = "mortarmq.look."

// cleanupTimeout bounds what is tidied up after a run, however it ended.
const cleanupTimeout = 5 * time.Second

// letter is one dead letter.
type letter struct {
	sequence   uint64 // in the dead-letter topic
	env        deadletter.Envelope
	key, value []byte
}

// errEnough, returned by a visitor, ends the reading without an error.
var errEnough = errors.New("enough")

func decodeLetter(m *client.Message) (*letter, error) {
	l := &letter{sequence: m.Sequence, key: m.Key}
	var err error
	if l.value, err = l.env.Decode(m.Value); err != nil {
		return nil, refusedf("letter %d of %s: %w: does another version of mortarmq know it?", m.Sequence, m.Topic, err)
	}
	return l, nil
}

// eachLetter calls visit with every dead letter that a group has now, in order.
func (a *app) eachLetter(ctx context.Context, group string, visit func(*letter) error) error {
	return a.eachLetterFrom(ctx, group, 1, visit)
}

// eachLetterFrom is eachLetter from a sequence on.
func (a *app) eachLetterFrom(ctx context.Context, group string, from uint64, visit func(*letter) error) error {
	topic, err := deadLetterTopic(group)
	if err != nil {
		return err
	}
	last, err := a.letterCount(ctx, group, topic)
	if err != nil || last < from {
		return err
	}
	c, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	look := fmt.Sprintf("%s%016x", lookGroup, rand.Uint64())
	defer a.tidy(ctx, func(ctx context.Context) { _, _ = c.DeleteGroup(ctx, topic, look) })
	if from > 1 {
		// The group is made first, so that it can be moved before anything is read.
		if err := a.moveNewGroup(ctx, c, topic, look, from); err != nil {
			return err
		}
	}
	k, err := a.consume(ctx, c, topic, look, client.ConsumerOptions{})
	if err != nil {
		return err
	}
	defer a.tidy(ctx, func(ctx context.Context) { _ = k.Close(ctx) })
	err = a.eachMessage(ctx, k, func(m *client.Message) error {
		l, err := decodeLetter(m)
		if err == nil {
			err = visit(l)
		}
		_ = m.Ack() // for the credit
		if err == nil && m.Sequence >= last {
			err = errEnough
		}
		return err
	})
	return err
}

// moveNewGroup makes a group by joining and leaving it, and moves it.
func (a *app) moveNewGroup(ctx context.Context, c *client.Client, topic, name string, from uint64) error {
	k, err := a.consume(ctx, c, topic, name, client.ConsumerOptions{CreditCount: 1, Start: protocol.StartLatest})
	if err != nil {
		return err
	}
	a.tidy(ctx, func(ctx context.Context) { _ = k.Close(ctx) })
	ctx, cancel := a.requestContext(ctx)
	defer cancel()
	_, err = c.ResetGroup(ctx, topic, name, client.AtSequence(from), client.ResetOptions{Force: true})
	return a.brokerError(err)
}

// letterCount returns the last sequence of a group's dead-letter topic, 0 if there is none yet. A group that does not exist
// is an error, unless it has left dead letters.
func (a *app) letterCount(ctx context.Context, group, topic string) (uint64, error) {
	s, err := a.stats(ctx, topic, "")
	if errors.Is(err, errNotFound) {
		if _, err = a.stats(ctx, "", group); errors.Is(err, errNotFound) {
			return 0, refusedf("there is no group %q, nor dead letters of one: 'mortarmq groups list' lists the groups", group)
		}
		return 0, err
	}
	if err != nil {
		return 0, err
	}
	if last, ok := s.lastSeqs(topic); ok && len(last) == 1 {
		return last[0], nil
	}
	return 0, nil
}

// consume joins a group, with a window for many messages where opts has none.
func (a *app) consume(ctx context.Context, c *client.Client, topic, name string, opts client.ConsumerOptions) (*client.Consumer, error) {
	if opts.CreditCount == 0 {
		opts.CreditCount, opts.CreditBytes = subCreditMessages, subCreditBytes
	}
	ctx, cancel := a.requestContext(ctx)
	defer cancel()
	k, err := c.NewConsumer(ctx, topic, name, opts)
	if err != nil {
		return nil, a.brokerError(err)
	}
	return k, nil
}

// eachMessage calls visit with each message until that returns an error; errEnough is a good end.
func (a *app) eachMessage(ctx context.Context, k *client.Consumer, visit func(*client.Message) error) error {
	messages := k.Messages()
	silence := time.NewTimer(a.timeout)
	defer silence.Stop()
	for {
		select {
		case m, ok := <-messages:
			if !ok {
				return a.brokerError(k.Err())
			}
			if err := visit(m); err != nil {
				if errors.Is(err, errEnough) {
					return nil
				}
				return err
			}
			silence.Reset(a.timeout)
		case <-silence.C:
			return unreachablef("no dead letter came for %v: does another run read them? --timeout waits longer", a.timeout)
		case <-ctx.Done():
			return errInterrupted
		}
	}
}

// tidy runs what is to be done at the end, also after an interrupt.
func (a *app) tidy(ctx context.Context, do func(context.Context)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	do(ctx)
}

// rowWriter prints rows as they come, in the forms of printRows.
type rowWriter[T any] struct {
	a    *app
	rows int
}

func newRowWriter[T any](a *app) *rowWriter[T] { return &rowWriter[T]{a: a} }

func (w *rowWriter[T]) row(r T) error {
	var b bytes.Buffer
	if w.a.json {
		if w.rows == 0 {
			b.WriteByte('[')
		} else {
			b.WriteByte(',')
		}
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(r); err != nil {
			return err
		}
		b.Truncate(b.Len() - 1) // the newline that Encode adds
	} else {
		appendRow(&b, reflect.ValueOf(r))
	}
	w.rows++
	return w.a.write(b.Bytes())
}

func (w *rowWriter[T]) end() error {
	switch {
	case !w.a.json:
		return nil
	case w.rows == 0:
		return w.a.write([]byte("[]\n"))
	default:
		return w.a.write([]byte("]\n"))
	}
}
