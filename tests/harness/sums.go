package harness

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"sort"
	"strconv"
	"strings"
)

// GroupSums are a group's numbers as /stats and /metrics give them.
type GroupSums struct {
	Group        string `json:"group"`
	Topic        string `json:"topic"`
	Published    uint64 `json:"published"`
	Acknowledged uint64 `json:"acknowledged"`
	Dropped      uint64 `json:"dropped"`
	DLQ          uint64 `json:"dlq"`
	InFlight     uint64 `json:"in_flight"`
	Waiting      uint64 `json:"waiting"`
	Lag          uint64 `json:"lag"`
}

// check tells what does not add up, nil if all does.
func (g *GroupSums) check(source string) error {
	if g.Published != g.Acknowledged+g.Dropped+g.InFlight+g.Waiting {
		return fmt.Errorf("%s, group %s of topic %s: published %d is not acknowledged %d + dropped %d + in flight %d + waiting %d",
			source, g.Group, g.Topic, g.Published, g.Acknowledged, g.Dropped, g.InFlight, g.Waiting)
	}
	if g.DLQ > g.Dropped {
		return fmt.Errorf("%s, group %s of topic %s: %d dead letters of %d dropped messages", source, g.Group, g.Topic, g.DLQ, g.Dropped)
	}
	return nil
}

// CheckSums reads the numbers of every group, from /metrics and from /stats, and returns what does not add up: what was
// published since the group's start is acknowledged, dropped, in flight or waiting at any moment, and no more letters are
// in a dead-letter topic than messages were dropped. The groups come back as /stats gives them, sorted by topic and name.
func (d *Daemon) CheckSums() ([]GroupSums, error) {
	fromMetrics, err := d.metricSums()
	if err != nil {
		return nil, err
	}
	var errs []error
	for i := range fromMetrics {
		errs = append(errs, fromMetrics[i].check("/metrics"))
	}
	var all []GroupSums
	for i := range fromMetrics {
		g, err := d.GroupStats(fromMetrics[i].Topic, fromMetrics[i].Group)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, g.check("/stats"))
		all = append(all, g)
	}
	return all, errors.Join(errs...)
}

// Failer is what EndScenario needs of a test.
type Failer interface {
	Helper()
	Failed() bool
	Errorf(format string, args ...any)
}

// EndScenario is for the end of a test: if the broker still runs, its groups' numbers must add up (see CheckSums). Then it is
// killed.
func (d *Daemon) EndScenario(t Failer) {
	t.Helper()
	select {
	case <-d.exited:
		return
	default:
	}
	defer d.Kill()
	if t.Failed() {
		return
	}
	if _, err := d.CheckSums(); err != nil {
		t.Errorf("at the end of the test: %v", err)
	}
}

// GroupStats returns the numbers of one group from /stats.
func (d *Daemon) GroupStats(topic, group string) (GroupSums, error) {
	body, err := d.get("/stats?" + url.Values{"topic": {topic}, "group": {group}}.Encode())
	if err != nil {
		return GroupSums{}, err
	}
	var stats struct {
		Groups []GroupSums `json:"groups"`
	}
	if err := json.Unmarshal(body, &stats); err != nil {
		return GroupSums{}, fmt.Errorf("/stats: %w", err)
	}
	if len(stats.Groups) != 1 {
		return GroupSums{}, fmt.Errorf("/stats has %d groups %s of topic %s", len(stats.Groups), group, topic)
	}
	return stats.Groups[0], nil
}

// metricSums collects the groups' metrics.
func (d *Daemon) metricSums() ([]GroupSums, error) {
	body, err := d.get("/metrics")
	if err != nil {
		return nil, err
	}
	groups := map[[2]string]*GroupSums{}
	for lines := bufio.NewScanner(strings.NewReader(string(body))); lines.Scan(); {
		name, labels, value, ok := splitMetric(lines.Text())
		if !ok || !strings.HasPrefix(name, "mortarmq_group_") {
			continue
		}
		key := [2]string{labels["topic"], labels["group"]}
		g := groups[key]
		if g == nil {
			g = &GroupSums{Topic: key[0], Group: key[1]}
			groups[key] = g
		}
		switch strings.TrimPrefix(name, "mortarmq_group_") {
		case "published_total":
			g.Published = value
		case "acknowledged_total":
			g.Acknowledged = value
		case "dropped_total":
			g.Dropped = value
		case "dlq_total":
			g.DLQ = value
		case "in_flight":
			g.InFlight = value
		case "waiting":
			g.Waiting = value
		case "lag":
			g.Lag = value
		}
	}
	all := make([]GroupSums, 0, len(groups))
	for _, g := range groups {
		all = append(all, *g)
	}
	sort.Slice(all, func(i, j int) bool {
		if all[i].Topic != all[j].Topic {
			return all[i].Topic < all[j].Topic
		}
		return all[i].Group < all[j].Group
	})
	return all, nil
}

// splitMetric reads a line such as name{a="x",b="y"} 12, whose label values need no escapes.
func splitMetric(line string) (name string, labels map[string]string, value uint64, ok bool) {
	name, rest, ok := strings.Cut(line, "{")
	if !ok {
		return "", nil, 0, false
	}
	list, number, ok := strings.Cut(rest, "} ")
	if !ok {
		return "", nil, 0, false
	}
	labels = map[string]string{}
	for _, pair := range strings.Split(list, ",") {
		k, v, _ := strings.Cut(pair, "=")
		labels[k] = strings.Trim(v, `"`)
	}
	f, err := strconv.ParseFloat(number, 64)
	return name, labels, uint64(f), err == nil
}

func (d *Daemon) get(path string) ([]byte, error) {
	var b bytes.Buffer
	err := d.Fetch(path, &b)
	return b.Bytes(), err
}
