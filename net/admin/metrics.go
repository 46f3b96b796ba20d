package admin

import (
	"context"
	"fmt"
	"math"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mortarmq/mortarmq/engine/coord"
)

// metric is one of the fixed names.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func gauge(name, help string, labels ...string) metric {
	return metric{prometheus.NewDesc("mortarmq_"+name, help, labels, nil), prometheus.GaugeValue}
}

func counter(name, help string, labels ...string) metric {
	return metric{prometheus.NewDesc("mortarmq_"+name, help, labels, nil), prometheus.CounterValue}
}

// The names, types and labels of the specification.
var (
	uptime      = gauge("broker_uptime_seconds", "Time since the broker was started.")
	connections = gauge("connections", "Client connections.")
	leaderEpoch = gauge("leader_epoch", "Epoch of the leader.")
	quorumState = gauge("quorum_state", "0 healthy, 1 soft, 2 read-only.")

	produced   = counter("topic_messages_produced_total", "Committed publishes, without duplicates.", "topic")
	delivered  = counter("topic_messages_delivered_total", "Acknowledged messages, over all groups.", "topic")
	dropped    = counter("topic_messages_dropped_total", "Messages out of attempts or rejected.", "topic")
	dlq        = counter("topic_messages_dlq_total", "Messages that reached a dead-letter topic.", "topic")
	topicBytes = counter("topic_bytes_total", "Keys and values of committed publishes, in bytes.", "topic")

	partitionDepth = gauge("partition_depth", "Messages above the ack floor of the group that is furthest behind.", "topic", "partition")
	partitionLast  = gauge("partition_last_seq", "Last committed sequence.", "topic", "partition")

	groupLag      = gauge("group_lag", "Largest depth of the group's partitions.", "topic", "group")
	groupInFlight = gauge("group_in_flight", "Messages under a lease.", "topic", "group")
	groupWaiting  = gauge("group_waiting", "Messages not delivered yet, waiting for their next attempt or for their dead letter.", "topic", "group")
	// These four and the two above make a sum: published = acknowledged + dropped + in flight + waiting. They are on record
	// and survive restarts; they start anew where the group is set to another position.
	groupPublished = counter("group_published_total", "Messages behind the position at which the group began.", "topic", "group")
	groupAcked     = counter("group_acknowledged_total", "Of the published messages, those acknowledged.", "topic", "group")
	groupDropped   = counter("group_dropped_total", "Of the published messages, those out of attempts or rejected.", "topic", "group")
	groupDLQ       = counter("group_dlq_total", "Of the dropped messages, those in the dead-letter topic.", "topic", "group")
	groupRetries   = counter("group_retries_total", "Redeliveries.", "topic", "group")

	e2eLatency = gauge("e2e_latency_ms", "Time from PUB received to ACK durable, over the last 60 s, in milliseconds.", "quantile")
)

// collector turns snapshots into metrics. It describes nothing beforehand, for the source may bring names of its own.
type collector struct{ source Source }

func newCollector(source Source) prometheus.Collector { return collector{source} }

// Describe implements prometheus.Collector.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), snapshotTimeout)
	defer cancel()
	snap, err := c.source.Snapshot(ctx)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(uptime.desc, fmt.Errorf("the broker does not tell its state: %w", err))
		return
	}
	e := emitter{ch: ch, seen: make(map[string]bool)}
	e.emit(uptime, snap.Uptime.Seconds())
	e.emit(connections, float64(snap.Connections))
	e.emit(quorumState, float64(snap.Quorum))
	for _, list := range [][]Counter{snap.Network, snap.Storage, snap.Peers} {
		for i := range list {
			e.extra(&list[i])
		}
	}
	if snap.Coord != nil {
		e.coord(snap.Coord)
	}
}

// emitter sends metrics, each combination of name and labels once: a topic that is being deleted and its successor of
// the same name would otherwise spoil the whole answer.
type emitter struct {
	ch   chan<- prometheus.Metric
	seen map[string]bool
}

func (e *emitter) emit(m metric, value float64, labels ...string) {
	key := m.desc.String()
	for _, l := range labels {
		key += "\x00" + l
	}
	if e.seen[key] {
		return
	}
	e.seen[key] = true
	e.ch <- prometheus.MustNewConstMetric(m.desc, m.kind, value, labels...)
}

func (e *emitter) extra(c *Counter) {
	m := metric{kind: prometheus.CounterValue}
	if c.Gauge {
		m.kind = prometheus.GaugeValue
	}
	var names, values []string
	for _, l := range []struct{ name, value string }{{"shard", c.Shard}, {"peer", c.Peer}, {"lane", c.Lane}} {
		if l.value != "" {
			names, values = append(names, l.name), append(values, l.value)
		}
	}
	m.desc = prometheus.NewDesc(c.Name, c.Help, names, nil)
	e.emit(m, c.Value, values...)
}

func (e *emitter) coord(s *coord.Stats) {
	e.emit(leaderEpoch, float64(s.Epoch))
	for _, q := range []struct {
		name  string
		value float64
	}{{"p50", s.E2E.P50Ms}, {"p90", s.E2E.P90Ms}, {"p99", s.E2E.P99Ms}} {
		if s.E2E.Count == 0 {
			q.value = math.NaN() // as Prometheus's own summaries say that there was nothing to measure
		}
		e.emit(e2eLatency, q.value, q.name)
	}
	// The youngest of a name comes first: ids only grow.
	for i := len(s.Topics) - 1; i >= 0; i-- {
		e.topic(&s.Topics[i])
	}
	for i := len(s.Groups) - 1; i >= 0; i-- {
		g := &s.Groups[i]
		e.emit(groupLag, float64(g.Lag), g.Topic, g.Name)
		e.emit(groupInFlight, float64(g.InFlight), g.Topic, g.Name)
		e.emit(groupRetries, float64(g.Retries), g.Topic, g.Name)
		e.emit(groupWaiting, float64(g.Waiting), g.Topic, g.Name)
		e.emit(groupPublished, float64(g.Published), g.Topic, g.Name)
		e.emit(groupAcked, float64(g.Acknowledged), g.Topic, g.Name)
		e.emit(groupDropped, float64(g.Dropped), g.Topic, g.Name)
		e.emit(groupDLQ, float64(g.DLQ), g.Topic, g.Name)
	}
}

func (e *emitter) topic(t *coord.TopicStats) {
	e.emit(produced, float64(t.Produced), t.Name)
	e.emit(delivered, float64(t.Delivered), t.Name)
	e.emit(dropped, float64(t.Dropped), t.Name)
	e.emit(dlq, float64(t.DLQ), t.Name)
	e.emit(topicBytes, float64(t.ProducedBytes), t.Name)
	for i, p := range t.Parts {
		n := strconv.Itoa(i)
		e.emit(partitionDepth, float64(p.Depth), t.Name, n)
		e.emit(partitionLast, float64(p.LastSeq), t.Name, n)
	}
}
