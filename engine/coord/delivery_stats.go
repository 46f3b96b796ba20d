package coord

import (
	"cmp"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/mortarmq/mortarmq/engine/ledger"
)

// latency holds the time from PUB to a durable ACK, sampled, over the last minute.
type latency struct {
	window *hdrhistogram.WindowedHistogram
	next   time.Duration // when the oldest part of the window goes
}

const (
	latencyParts    = 6
	latencyInterval = 10 * time.Second
	maxLatencyMs    = 3_600_000
)

func (l *latency) init() {
	l.window = hdrhistogram.NewWindowed(latencyParts, 1, maxLatencyMs, 2)
}

// record takes a sample: the wall clock now and at the publish, in milliseconds. The clock may have stepped in between.
func (l *latency) record(nowMs, sinceMs uint64) {
	ms := int64(1)
	if nowMs > sinceMs {
		ms = min(int64(nowMs-sinceMs), maxLatencyMs)
	}
	_ = l.window.Current.RecordValue(ms) // it is within the histogram's range
}

func (l *latency) rotate(now time.Duration) {
	for l.next <= now {
		if l.next == 0 {
			l.next = now
		} else {
			l.window.Rotate()
		}
		l.next += latencyInterval
	}
}

// endToEnd returns the time from a publish to its durable ACK over the last minute.
func (d *delivery) endToEnd() Quantiles {
	h := d.latency.window.Merge()
	return Quantiles{
		P50Ms: float64(h.ValueAtQuantile(50)), P90Ms: float64(h.ValueAtQuantile(90)), P99Ms: float64(h.ValueAtQuantile(99)),
		Count: uint64(h.TotalCount()),
	}
}

func add(a, b ledger.Counts) ledger.Counts {
	return ledger.Counts{Acked: a.Acked + b.Acked, Dropped: a.Dropped + b.Dropped, Buried: a.Buried + b.Buried}
}

// groupStats implements deliverer.
func (d *delivery) groupStats(g *GroupStats) {
	gd := d.groups[g.ID]
	if gd == nil {
		return
	}
	for n, set := range gd.sets {
		lag := uint64(0)
		for i, rd := range set.readers {
			s := rd.cur.Stats()
			lag = max(lag, s.Depth)
			g.count(i, n == 0, &s)
		}
		g.memberLag(set.member, lag)
	}
}

// standbyStats implements deliverer: while standing by there are no readers, but the ledgers have the cursors.
func (d *delivery) standbyStats(g *GroupStats) {
	members := []uint64{0}
	if g.Settings.Broadcast {
		members = members[:0]
		for i := range g.Members {
			members = append(members, g.Members[i].ID)
		}
	}
	for n, member := range members {
		lag := uint64(0)
		for i := range g.Parts {
			part := uint16(i)
			cur := d.ledgers[d.c.placement(g.TopicID, part)].book.Cursor(ledger.Key{Group: g.ID, Topic: g.TopicID, Partition: part, Member: member})
			if cur == nil {
				continue
			}
			s := cur.Stats()
			if p := d.known(g.TopicID, part); p != nil && sequence(p.last) > s.Last { // nobody tells cursors meanwhile
				more := uint64(sequence(p.last) - s.Last)
				s.Last, s.Depth, s.Unsettled = s.Last+ledger.Sequence(more), s.Depth+more, s.Unsettled+more
			}
			lag = max(lag, s.Depth)
			g.count(i, n == 0, &s)
		}
		g.memberLag(member, lag)
	}
}

// count adds what a cursor of partition i knows; first: it is the partition's first one.
func (g *GroupStats) count(i int, first bool, s *ledger.Stats) {
	g.Lag = max(g.Lag, s.Depth)
	g.InFlight += s.InFlight
	g.Waiting += s.Unsettled - s.InFlight
	g.Retries += s.Retried
	g.Published += uint64(s.Last - s.Start)
	g.Acknowledged += s.Acked
	g.Dropped += s.Dropped
	g.DLQ += s.Buried
	if i < len(g.Parts) {
		p := &g.Parts[i]
		if p.Lag, p.InFlight = max(p.Lag, s.Depth), p.InFlight+s.InFlight; first || uint64(s.Floor) < p.AckFloor {
			p.AckFloor = uint64(s.Floor)
		}
	}
}

// memberLag notes the lag of a member of a broadcast group; 0 is none.
func (g *GroupStats) memberLag(member, lag uint64) {
	at, ok := slices.BinarySearchFunc(g.Members, member, func(m MemberStats, id uint64) int { return cmp.Compare(m.ID, id) })
	if ok {
		g.Members[at].Lag = lag
	}
}

// topicStats implements deliverer.
func (d *delivery) topicStats(t *TopicStats) {
	for i := range t.Parts {
		p := d.known(t.ID, uint16(i))
		if p == nil {
			continue
		}
		t.Parts[i].FirstSeq, t.Parts[i].LastSeq = uint64(p.first), uint64(p.last)
		t.Produced += p.produced
		t.ProducedBytes += p.producedBytes
		n := p.settled
		for _, rd := range p.readers {
			s := rd.cur.Stats()
			n = add(n, s.Run)
			t.Parts[i].Depth = max(t.Parts[i].Depth, s.Depth)
		}
		t.Delivered += n.Acked
		t.Dropped += n.Dropped
		t.DLQ += n.Buried
	}
}
