package main

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

const (
	membersPartitions = 1000
	groupsPartitions  = 4
	// perConnection is how many members share a connection, which may have 1 024 subscriptions.
	perConnection = 250
)

var (
	memberCounts = []int{10, 25, 50, 100}
	groupCounts  = []int{100, 250, 500, 1000}
)

// stage is a broker with a topic and connections that members share.
type stage struct {
	d      *harness.Daemon
	topic  uint16
	crowds []*harness.Crowd
}

func (b *bencher) stage(ctx context.Context, partitions, members int) (*stage, error) {
	d, err := b.broker(ctx)
	if err != nil {
		return nil, err
	}
	s := &stage{d: d}
	c, err := harness.Dial(d.ClientAddr, "")
	if err != nil {
		s.end()
		return nil, err
	}
	defer c.Close()
	res, err := c.Declare(topicName, partitions)
	if err != nil {
		s.end()
		return nil, err
	}
	s.topic = res.TopicID
	for range (members + perConnection - 1) / perConnection {
		cr, err := harness.NewCrowd(d.ClientAddr, nil)
		if err != nil {
			s.end()
			return nil, err
		}
		s.crowds = append(s.crowds, cr)
	}
	return s, nil
}

func (s *stage) end() {
	for _, c := range s.crowds {
		c.Close()
	}
	s.d.Kill()
}

// join lets member i join.
func (s *stage) join(i int, group string) (*harness.CrowdMember, error) {
	return s.crowds[i%len(s.crowds)].Join(&protocol.Sub{Group: []byte(group), TopicID: s.topic, Partition: protocol.AnyPartition, Flags: protocol.SubFlagStream})
}

// members measures groups of several sizes on the same partitions.
func (b *bencher) members(ctx context.Context) error {
	fmt.Fprintf(b.out, "One group on %d partitions, CPU time of the broker in ms. Change: a member leaves and another joins, mean of %d.\n\n", membersPartitions, b.rounds)
	w := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "members\tall join, one by one\tper member\tchange\tidle, per second\tper member\t")
	for _, n := range memberCounts {
		if err := b.membersOf(ctx, w, n); err != nil {
			return err
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(b.out)
	return nil
}

func (b *bencher) membersOf(ctx context.Context, w *tabwriter.Writer, n int) error {
	s, err := b.stage(ctx, membersPartitions, n)
	if err != nil {
		return err
	}
	defer s.end()
	members := make([]*harness.CrowdMember, n)
	all, err := spent(s.d, func() error {
		for i := range members {
			if members[i], err = s.join(i, groupName); err != nil {
				return err
			}
		}
		_, err := settled(ctx, s.d, n)
		return err
	})
	if err != nil {
		return err
	}
	change, err := spent(s.d, func() error {
		for i := range b.rounds {
			at := i % n
			if err := members[at].Leave(); err != nil {
				return err
			}
			if members[at], err = s.join(at, groupName); err != nil {
				return err
			}
			if err := s.awaitOwned(members, membersPartitions); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	idle, err := spent(s.d, func() error { return b.pause(ctx, b.quiet) })
	if err != nil {
		return err
	}
	idle = time.Duration(float64(idle) / b.quiet.Seconds())
	fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t\n", n, milliseconds(all), milliseconds(all/time.Duration(n)), milliseconds(change/time.Duration(b.rounds)),
		milliseconds(idle), milliseconds(idle/time.Duration(n)))
	return nil
}

// awaitOwned waits until members know of all partitions; unlike a look at /stats it costs the broker nothing.
func (s *stage) awaitOwned(members []*harness.CrowdMember, partitions int) error {
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		sum := 0
		for _, m := range members {
			sum += m.Owned()
		}
		if sum == partitions {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("the members have %d of %d partitions", sum, partitions)
		}
	}
}

// groups measures numbers of groups that each have one member on the same topic.
func (b *bencher) groups(ctx context.Context) error {
	const messages = 100
	fmt.Fprintf(b.out, "Groups of one member on a topic of %d partitions, CPU time of the broker in ms. Message: one is published and acknowledged by each group, mean of %d.\n\n", groupsPartitions, messages)
	w := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "groups\tall join\tper group\tmessage\tper group\tidle, per second\tper group\t")
	for _, n := range groupCounts {
		if err := b.groupsOf(ctx, w, n, messages); err != nil {
			return err
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(b.out)
	return nil
}

func (b *bencher) groupsOf(ctx context.Context, w *tabwriter.Writer, n, messages int) error {
	s, err := b.stage(ctx, groupsPartitions, n)
	if err != nil {
		return err
	}
	defer s.end()
	members := make([]*harness.CrowdMember, n)
	all, err := spent(s.d, func() error {
		for i := range members {
			if members[i], err = s.join(i, fmt.Sprintf("group-%d", i)); err != nil {
				return err
			}
		}
		return s.awaitOwned(members, n*groupsPartitions)
	})
	if err != nil {
		return err
	}
	c, err := harness.Dial(s.d.ClientAddr, "")
	if err != nil {
		return err
	}
	defer c.Close()
	message, err := spent(s.d, func() error {
		for i := range messages {
			if _, err := c.Publish(&protocol.Pub{TopicID: s.topic, Partition: protocol.AnyPartition, Value: []byte("value")}); err != nil {
				return err
			}
			if err := awaitReceived(members, uint64(i+1)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	idle, err := spent(s.d, func() error { return b.pause(ctx, b.quiet) })
	if err != nil {
		return err
	}
	message /= time.Duration(messages)
	idle = time.Duration(float64(idle) / b.quiet.Seconds())
	per := func(d time.Duration) string { return milliseconds(d / time.Duration(n)) }
	fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t\n", n, milliseconds(all), per(all), milliseconds(message), per(message), milliseconds(idle), per(idle))
	return nil
}

func awaitReceived(members []*harness.CrowdMember, n uint64) error {
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Microsecond) {
		missing := 0
		for _, m := range members {
			if m.Received() < n {
				missing++
			}
		}
		if missing == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d groups have not got message %d", missing, n)
		}
	}
}
