package bench

import (
	"fmt"
	"strings"
)

// goal is one thing that the broker is to reach, as a bound of a quotient or of a figure.
type goal struct {
	what string
	// value is the measured figure; ok is false where what it needs was not measured.
	value func(m *medians) (v float64, ok bool)
	bound float64
	most  bool // the bound is an upper one
}

// medians looks figures up; one that is missing leaves bad set.
type medians struct {
	list []*group
	bad  bool
}

func (m *medians) of(workload, variant, system string, size int, f func(*Sample) float64) float64 {
	g := find(m.list, workload, variant, system, size)
	if g == nil {
		m.bad = true
		return 0
	}
	v := g.spread(f).median
	if v == 0 {
		m.bad = true
	}
	return v
}

// best returns the highest median of the durable peers, 0 and bad where there are none.
func (m *medians) best(workload, variant string, size int, f func(*Sample) float64) float64 {
	top := 0.0
	for _, g := range m.list {
		if g.workload == workload && g.variant == variant && g.size == size && !isMortard(g.system) && g.samples[0].Durable {
			top = max(top, g.spread(f).median)
		}
	}
	if top == 0 {
		m.bad = true
	}
	return top
}

func (m *medians) peers(workload, variant string, size int, durable bool) (names []string) {
	for _, g := range m.list {
		if g.workload == workload && g.variant == variant && g.size == size && !isMortard(g.system) && (g.samples[0].Durable || !durable) {
			names = append(names, g.system)
		}
	}
	return names
}

const (
	kib     = 1 << 10
	cluster = mortardName + "-3"
)

// publishRate is mortard's rate over a peer's in the pipelined publish run.
func publishRate(size int, peer string) func(*medians) (float64, bool) {
	return func(m *medians) (float64, bool) {
		return m.of("publish", "", mortardName, size, msgsPerSec) / m.of("publish", "", peer, size, msgsPerSec), !m.bad
	}
}

func clusterRate(size int, peer string) func(*medians) (float64, bool) {
	return func(m *medians) (float64, bool) {
		return m.of("cluster", "pipelined", cluster, size, msgsPerSec) / m.of("cluster", "pipelined", peer, size, msgsPerSec), !m.bad
	}
}

// floor is a quantile of one durable publish over the sum of what disk and network take.
func floor(q func(*Sample) float64) func(*medians) (float64, bool) {
	return func(m *medians) (float64, bool) {
		sum := m.of("disk", "", machineName, journalBlock(kib), q) + m.of("echo", "", machineName, kib, q)
		return m.of("publish-sync", "", mortardName, kib, q) / sum, !m.bad
	}
}

func partitionRate(n int) func(*medians) (float64, bool) {
	return func(m *medians) (float64, bool) {
		one := m.of("partitions", plural(1, "partition"), mortardName, kib, msgsPerSec)
		return m.of("partitions", plural(n, "partition"), mortardName, kib, msgsPerSec) / one, !m.bad
	}
}

func value(name string) func(*Sample) float64 {
	return func(s *Sample) float64 { return s.Values[name] }
}

var deliverP99 = orZero(func(s *Sample) *Quantiles { return s.DeliverLatency }, func(q *Quantiles) float64 { return q.P99 })

// goals are those of the project. Sizes are of values; everything is a median over the rounds of one run.
func goals(list []*group) []goal {
	all := []goal{
		{what: "publish 100B / redis-always", value: publishRate(100, "redis-always"), bound: 2.5},
		{what: "publish 100B / nats-always", value: publishRate(100, "nats-always"), bound: 100},
		{what: "publish 100B / rabbitmq", value: publishRate(100, "rabbitmq"), bound: 12},
		{what: "publish 100B / redis-everysec", value: publishRate(100, "redis-everysec"), bound: 1},
		{what: "publish 1KiB / redis-always", value: publishRate(kib, "redis-always"), bound: 6},
		{what: "publish 1KiB / nats-always", value: publishRate(kib, "nats-always"), bound: 50},
		{what: "publish 1KiB / nats-default", value: publishRate(kib, "nats-default"), bound: 1},
		{what: "publish 1KiB / redis-everysec", value: publishRate(kib, "redis-everysec"), bound: 1},
		{what: "publish 16KiB / best durable peer", bound: 2, value: func(m *medians) (float64, bool) {
			return m.of("publish", "", mortardName, 16*kib, msgsPerSec) / m.best("publish", "", 16*kib, msgsPerSec), !m.bad
		}},
		{what: "publish 16KiB MB/s / disk write MB/s", bound: 0.25, value: func(m *medians) (float64, bool) {
			return m.of("publish", "", mortardName, 16*kib, mbPerSec) / m.of("disk", "", machineName, bandwidthBlock, mbPerSec), !m.bad
		}},
		{what: "one outstanding 1KiB: p50 / (disk + echo)", value: floor(p50), bound: 1.2, most: true},
		{what: "one outstanding 1KiB: p99 / (disk + echo)", value: floor(p99), bound: 2, most: true},
		{what: "16 producers 1KiB / redis-always", bound: 1.5, value: func(m *medians) (float64, bool) {
			return m.of("producers", "", mortardName, kib, msgsPerSec) / m.of("producers", "", "redis-always", kib, msgsPerSec), !m.bad
		}},
		{what: "catch-up, warm cache: MB/s", bound: 1000, value: func(m *medians) (float64, bool) {
			return m.of("catchup", "", mortardName, catchupSize, mbPerSec), !m.bad
		}},
		{what: "catch-up, cold cache: MB/s / disk read MB/s", bound: 0.6, value: func(m *medians) (float64, bool) {
			return m.of("catchup", "", mortardName, catchupSize, value("cold_mb_per_s")) / m.of("disk-read", "", machineName, bandwidthBlock, mbPerSec), !m.bad
		}},
		{what: "publish 1KiB: CPU seconds per million", bound: 2.5, most: true, value: func(m *medians) (float64, bool) {
			return m.of("publish", "", mortardName, kib, cpu), !m.bad
		}},
		{what: "3 nodes, 1KiB / nats-r3-always", value: clusterRate(kib, "nats-r3-always"), bound: 2.8},
		{what: "3 nodes, 1KiB / rabbitmq-3", value: clusterRate(kib, "rabbitmq-3"), bound: 4},
		{what: "3 nodes, 100B / nats-r3-always", value: clusterRate(100, "nats-r3-always"), bound: 2},
		{what: "3 nodes, 100B / rabbitmq-3", value: clusterRate(100, "rabbitmq-3"), bound: 4},
		{what: "3 nodes, one outstanding 1KiB: p50 us", bound: 500, most: true, value: func(m *medians) (float64, bool) {
			return m.of("cluster", "one outstanding", cluster, clusterSyncSize, p50), !m.bad
		}},
		{what: "1024 partitions / 1", value: partitionRate(1024), bound: 0.85},
		{what: "4096 partitions / 1", value: partitionRate(4096), bound: 0.65},
	}
	all = append(all, endToEndGoals()...)
	m := &medians{list: list}
	for _, peer := range m.peers("publish-sync", "", kib, true) {
		all = append(all, goal{what: "one outstanding 1KiB: p50 / " + peer, bound: 1, most: true, value: func(m *medians) (float64, bool) {
			return m.of("publish-sync", "", mortardName, kib, p50) / m.of("publish-sync", "", peer, kib, p50), !m.bad
		}})
	}
	for _, peer := range m.peers("catchup", "", catchupSize, false) {
		all = append(all, goal{what: "catch-up, warm cache / " + peer, bound: 1, value: func(m *medians) (float64, bool) {
			return m.of("catchup", "", mortardName, catchupSize, mbPerSec) / m.of("catchup", "", peer, catchupSize, mbPerSec), !m.bad
		}})
	}
	return append(all, restartGoals(list)...)
}

func endToEndGoals() (list []goal) {
	for _, n := range []int{1, 4} {
		v := plural(n, "member")
		list = append(list,
			goal{what: "end to end at a rate, " + v + ": p99 until arrival / disk p50", bound: 8, most: true, value: func(m *medians) (float64, bool) {
				return m.of("end-to-end", v, mortardName, kib, deliverP99) / m.of("disk", "", machineName, journalBlock(kib), p50), !m.bad
			}},
			goal{what: "end to end at a rate, " + v + ": p99 until the ACK's answer / disk p50", bound: 8, most: true, value: func(m *medians) (float64, bool) {
				return m.of("end-to-end", v, mortardName, kib, p99) / m.of("disk", "", machineName, journalBlock(kib), p50), !m.bad
			}},
			goal{what: "end to end at a rate, " + v + ": p99 until arrival / redis-always", bound: 0.6, most: true, value: func(m *medians) (float64, bool) {
				return m.of("end-to-end", v, mortardName, kib, deliverP99) / m.of("end-to-end", v, "redis-always", kib, deliverP99), !m.bad
			}},
			goal{what: "end to end at a rate, " + v + ": p99 until the ACK's answer / redis-always", bound: 0.6, most: true, value: func(m *medians) (float64, bool) {
				return m.of("end-to-end", v, mortardName, kib, p99) / m.of("end-to-end", v, "redis-always", kib, p99), !m.bad
			}},
			goal{what: "end to end flat out, " + v + " / best durable peer", bound: 3, value: func(m *medians) (float64, bool) {
				return m.of("end-to-end-max", v, mortardName, kib, msgsPerSec) / m.best("end-to-end-max", v, kib, msgsPerSec), !m.bad
			}})
	}
	return list
}

// restartGoals compare restarts with the most stored to those with the least.
func restartGoals(list []*group) []goal {
	var small, large *group
	for _, g := range list {
		if g.workload == "restart" && isMortard(g.system) {
			if small == nil {
				small = g
			}
			large = g
		}
	}
	if small == large {
		return nil
	}
	var all []goal
	for _, kind := range []string{"clean", "killed"} {
		name := kind + "_restart_s"
		all = append(all, goal{what: fmt.Sprintf("restart (%s) with %s / with %s", kind, large.variant, small.variant), bound: 1.5, most: true,
			value: func(m *medians) (float64, bool) {
				return m.of("restart", large.variant, large.system, 0, value(name)) / m.of("restart", small.variant, small.system, 0, value(name)), !m.bad
			}})
	}
	return all
}

// goalSheet says for every goal that was measured whether it is met.
func goalSheet(list []*group) sheet {
	s := sheet{title: "Goals", columns: []string{"goal", "measured", "wanted", ""}}
	for _, g := range goals(list) {
		v, ok := g.value(&medians{list: list})
		if !ok {
			continue
		}
		sign, met := ">=", v >= g.bound
		if g.most {
			sign, met = "<=", v <= g.bound
		}
		verdict := "missed"
		if met {
			verdict = "met"
		}
		s.rows = append(s.rows, []string{g.what, num(v), sign + " " + strings.TrimSuffix(strings.TrimSuffix(fmt.Sprintf("%.2f", g.bound), "0"), ".0"), verdict})
	}
	return s
}
