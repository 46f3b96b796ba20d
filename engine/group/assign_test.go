package group

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

func TestAssign(t *testing.T) {
	for name, c := range map[string]struct {
		members  []uint64
		previous []uint64
		want     []uint64
	}{
		"nobody":                      {nil, []uint64{1, 2}, []uint64{0, 0}},
		"one takes all":               {[]uint64{5}, []uint64{0, 0, 0}, []uint64{5, 5, 5}},
		"no partitions":               {[]uint64{5}, nil, []uint64{}},
		"three share seven":           {[]uint64{1, 2, 3}, make([]uint64, 7), []uint64{1, 1, 1, 2, 2, 3, 3}},
		"more members than parts":     {[]uint64{1, 2, 3}, []uint64{0, 2}, []uint64{1, 2}},
		"a leaver's go to the others": {[]uint64{1, 3}, []uint64{1, 2, 3, 2}, []uint64{1, 1, 3, 3}},
		"nothing to move":             {[]uint64{1, 2}, []uint64{2, 1, 2}, []uint64{2, 1, 2}},
		"a fourth joins three":        {[]uint64{1, 2, 3, 4}, []uint64{1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3}, []uint64{1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 4, 4}},
		"the extra one stays":         {[]uint64{1, 2, 3}, []uint64{2, 2, 2, 0}, []uint64{2, 2, 1, 3}},
	} {
		if got := Assign(c.members, c.previous); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// fewestMoves is the naive bound: of what each member holds it can keep at most its due, and the larger dues go to whom
// they help.
func fewestMoves(held map[uint64]int, members, partitions int) int {
	base, extra := partitions/members, partitions%members
	moves := 0
	for _, h := range held {
		switch {
		case h > base && extra > 0:
			extra--
			moves += h - base - 1
		case h > base:
			moves += h - base
		}
	}
	return moves
}

func TestAssign_IsBalancedAndMovesNoMoreThanItMust(t *testing.T) {
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 0))
		members := make([]uint64, 1+rng.IntN(8))
		for i := range members {
			members[i] = uint64(2*i + 1)
		}
		previous := make([]uint64, rng.IntN(30))
		held := make(map[uint64]int)
		for p := range previous {
			// Even ids are members that left, 0 is nobody.
			previous[p] = uint64(rng.IntN(2 * len(members)))
			if previous[p]%2 == 1 {
				held[previous[p]]++
			}
		}
		got := Assign(members, previous)
		count := make(map[uint64]int)
		moves := 0
		for p, id := range got {
			count[id]++
			if previous[p]%2 == 1 && previous[p] != id {
				moves++
			}
		}
		lo, hi := len(previous), 0
		for _, id := range members {
			lo, hi = min(lo, count[id]), max(hi, count[id])
		}
		if hi-lo > 1 || count[0] > 0 {
			t.Fatalf("seed %d: %v over %v gives %v: not balanced", seed, previous, members, got)
		}
		if want := fewestMoves(held, len(members), len(previous)); moves != want {
			t.Fatalf("seed %d: %v over %v gives %v: %d moves, %d suffice", seed, previous, members, got, moves, want)
		}
		if !reflect.DeepEqual(got, Assign(members, previous)) {
			t.Fatalf("seed %d: not deterministic", seed)
		}
	}
}

func TestStrategy_DealsOutAsRocketMQDoes(t *testing.T) {
	three := []uint64{1, 2, 3}
	for name, c := range map[string]struct {
		s       Strategy
		members []uint64
		parts   int
		want    []uint64
	}{
		"averagely":                        {Averagely, three, 8, []uint64{1, 1, 1, 2, 2, 2, 3, 3}},
		"circle":                           {Circle, three, 8, []uint64{1, 2, 3, 1, 2, 3, 1, 2}},
		"averagely, even":                  {Averagely, three, 6, []uint64{1, 1, 2, 2, 3, 3}},
		"averagely, more members":          {Averagely, three, 2, []uint64{1, 2}},
		"circle, more members":             {Circle, three, 2, []uint64{1, 2}},
		"averagely, nobody":                {Averagely, nil, 2, []uint64{0, 0}},
		"circle, nobody":                   {Circle, nil, 2, []uint64{0, 0}},
		"sticky keeps what averagely does": {Sticky, []uint64{1, 2}, 4, []uint64{2, 1, 2, 1}},
	} {
		previous := []uint64{2, 1, 2, 1, 2, 1, 2, 1}[:c.parts]
		if got := c.s.assign(c.members, previous); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	for members := 1; members < 20; members++ {
		var ids []uint64
		for i := range members {
			ids = append(ids, uint64(10+i))
		}
		for parts := range 70 {
			for _, s := range []Strategy{Averagely, Circle} {
				if got, want := s.assign(ids, make([]uint64, parts)), naive(s, ids, parts); !slices.Equal(got, want) {
					t.Fatalf("strategy %d, %d members, %d partitions: %v, want %v", s, members, parts, got, want)
				}
			}
		}
	}
}
