package cluster

import (
	"context"
	"fmt"
	"reflect"
	"testing"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// what every node tells of topics, groups and the leader: the members' connections and what runs from a process's start are
// the leader's own.
type told struct {
	Topics []struct {
		Name       string `json:"name"`
		Partitions int    `json:"partitions"`
		State      string `json:"state"`
	}
	Groups []struct {
		Group        string `json:"group"`
		Topic        string `json:"topic"`
		State        string `json:"state"`
		Lag          int    `json:"lag"`
		Published    int    `json:"published"`
		Acknowledged int    `json:"acknowledged"`
	}
	Members []struct {
		Member         uint64 `json:"member"`
		OwnershipEpoch uint64 `json:"ownership_epoch"`
		Lag            int    `json:"lag"`
	}
	Leader struct {
		LeaderID    int    `json:"leader_id"`
		LeaderEpoch uint64 `json:"leader_epoch"`
	}
	Depth []struct {
		Parts []struct {
			LastSeq uint64 `json:"last_seq"`
			Depth   uint64 `json:"depth"`
		} `json:"partition_stats"`
	}
}

func tell(d *harness.Daemon) (t told, err error) {
	var stats struct {
		Topics any `json:"topics"`
	}
	stats.Topics = &t.Depth
	for path, v := range map[string]any{"/topics": &t.Topics, "/groups": &t.Groups, "/groups/g": &t.Members, "/leader": &t.Leader, "/stats?topic=t": &stats} {
		if err := d.FetchJSON(path, v); err != nil {
			return t, err
		}
	}
	return t, nil
}

func TestState_EveryNodeTellsOfTopicsGroupsAndTheLeader(t *testing.T) {
	r := start(t, harness.ClusterOptions{Config: small})
	c := r.client()
	r.declare(c, "t")
	r.publish(c, "t", "m", 20, 100)
	var k *client.Consumer
	r.do("join", func(ctx context.Context) (err error) {
		k, err = c.NewConsumer(ctx, "t", "g", client.ConsumerOptions{CreditCount: 10})
		return err
	})
	for range 5 {
		m := receive(t, k)
		r.do("acknowledge", m.AckSync)
	}
	r.publish(c, "t", "more", 20, 100)
	// Followers hear a moment later what is committed.
	last := ""
	r.do("all nodes tell the same", func(ctx context.Context) error {
		err := until(ctx, func() bool {
			leader, err := r.Leader(ctx)
			if err != nil {
				return false
			}
			want, err := tell(r.Node(leader))
			if err != nil || len(want.Groups) != 1 || want.Groups[0].Acknowledged != 5 || want.Groups[0].Published != 40 {
				last = fmt.Sprintf("leader %d: %+v, %v", leader, want, err)
				return false
			}
			for _, i := range others(leader) {
				if got, err := tell(r.Node(i)); err != nil || !reflect.DeepEqual(got, want) {
					last = fmt.Sprintf("leader %d: %+v\nnode %d: %+v, %v", leader, want, i, got, err)
					return false
				}
			}
			return true
		})
		if err != nil {
			return fmt.Errorf("%w: %s", err, last)
		}
		return nil
	})
	r.do("leave", k.Close)
}
