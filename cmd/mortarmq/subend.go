package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// How often --exit-empty asks the broker how far the group is: after each batch, but not more often than the first, and in
// any case after the second, since other members acknowledge as well.
const (
	endPollMin = 50 * time.Millisecond
	endPollMax = time.Second
)

// endWatch waits until a group has acknowledged everything that was committed when findEnd was called. Nothing depends on
// how fast anything is: the broker's ack floors tell, whoever it was that acknowledged.
type endWatch struct {
	app          *app
	topic, group string
	end          []uint64
	done         chan error // nil when the end is reached
	poke         chan struct{}
	cancel       context.CancelFunc
	wg           sync.WaitGroup
}

// findEnd notes where the topic ends now and starts to watch the group. The caller ends it with stop.
func (a *app) findEnd(ctx context.Context, topic, group string) (*endWatch, error) {
	s, err := a.stats(ctx, topic, group) // not all groups of the topic, which may be many
	var end []uint64
	found := false
	if err == nil {
		end, found = s.lastSeqs(topic)
	}
	switch {
	case errors.Is(err, errNotFound), err == nil && !found:
		return nil, refusedf("topic %q does not exist: create it with 'mortarmq topics create %s'", topic, topic)
	case err != nil:
		return nil, fmt.Errorf("--exit-empty asks the admin interface for the end of the topic: %w", err)
	}
	w := &endWatch{app: a, topic: topic, group: group, end: end, done: make(chan error, 1), poke: make(chan struct{}, 1)}
	ctx, w.cancel = context.WithCancel(ctx)
	w.wg.Go(func() { w.watch(ctx) })
	return w, nil
}

// wake tells that something was acknowledged.
func (w *endWatch) wake() {
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

func (w *endWatch) stop() {
	w.cancel()
	w.wg.Wait()
}

func (w *endWatch) watch(ctx context.Context) {
	poll := time.NewTimer(endPollMin)
	defer poll.Stop()
	failing := time.Time{}
	for {
		select {
		case <-poll.C:
		case <-w.poke:
		case <-ctx.Done():
			return
		}
		s, err := w.app.stats(ctx, w.topic, w.group)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && s.reached(w.topic, w.group, w.end):
			w.done <- nil
			return
		case err == nil:
			failing = time.Time{}
		case failing.IsZero():
			failing = time.Now()
		}
		if err != nil && (time.Since(failing) > w.app.timeout || errors.Is(err, errNotFound)) {
			w.done <- fmt.Errorf("--exit-empty asks the admin interface how far the group is: %w", err)
			return
		}
		select {
		case <-time.After(endPollMin):
		case <-ctx.Done():
			return
		}
		poll.Reset(endPollMax)
	}
}
