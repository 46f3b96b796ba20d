package peers

import "github.com/mortarmq/mortarmq/bench"

// All returns every peer with every setting, those of one node first.
func All() []*bench.Peer {
	var all []*bench.Peer
	for _, list := range [][]*bench.Peer{natsPeers(), nsqPeers(), redisPeers(), rabbitPeers()} {
		all = append(all, list...)
	}
	var ordered []*bench.Peer
	for _, nodes := range []int{1, 3} {
		for _, p := range all {
			if p.Nodes == nodes {
				ordered = append(ordered, p)
			}
		}
	}
	return ordered
}
