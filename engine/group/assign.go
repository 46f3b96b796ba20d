package group

// Strategy says how partitions are spread over members. Whatever it is, no two members differ by more than one.
type Strategy uint8

const (
	// Sticky moves as few partitions as possible.
	Sticky Strategy = iota
	// Averagely gives each member a run of neighbouring partitions, the first members one more where they don't come out
	// even: 8 partitions and 3 members are 012|345|67. It is RocketMQ's AllocateMessageQueueAveragely.
	Averagely
	// Circle deals the partitions out one by one: 036|147|25. It is RocketMQ's AllocateMessageQueueAveragelyByCircle.
	Circle
)

// assign computes the target of a strategy. members and previous are as in Assign; only Sticky looks at previous.
func (s Strategy) assign(members, previous []uint64) []uint64 {
	if s == Sticky || len(members) == 0 {
		return Assign(members, previous)
	}
	result := make([]uint64, len(previous))
	base, extra := len(result)/len(members), len(result)%len(members)
	for p := range result {
		switch {
		case s == Circle:
			result[p] = members[p%len(members)]
		case p < extra*(base+1):
			result[p] = members[p/(base+1)]
		default:
			result[p] = members[extra+(p-extra*(base+1))/base]
		}
	}
	return result
}

// Assign spreads partitions over members so that no two members differ by more than one, moving as few as possible.
//
// members are distinct and ascending; previous says for each partition who has (or was promised) it, 0 or an id that is
// not among members where nobody has. The result has one member id per partition, 0 everywhere if there are no members.
// Equal arguments give equal results.
//
// With n partitions and m members everybody is due n/m, and n%m of them one more. Of the members that hold more than
// n/m, as many as possible are let keep the extra one; what exceeds a member's due is given up from its highest
// partition down. So exactly sum(max(0, held-due)) partitions leave a living owner: no balanced assignment needs fewer.
func Assign(members []uint64, previous []uint64) []uint64 {
	result := make([]uint64, len(previous))
	if len(members) == 0 {
		return result
	}
	index := make(map[uint64]int, len(members))
	for i, id := range members {
		index[id] = i
	}
	held := make([]int, len(members))
	for p, id := range previous {
		if i, ok := index[id]; ok {
			held[i]++
			result[p] = id
		}
	}
	due := dues(held, len(previous))
	for p := len(result) - 1; p >= 0; p-- {
		if i, ok := index[result[p]]; ok && held[i] > due[i] {
			held[i]--
			result[p] = 0
		}
	}
	next := 0
	for p := range result {
		if result[p] != 0 {
			continue
		}
		for held[next] >= due[next] {
			next++
		}
		result[p] = members[next]
		held[next]++
	}
	return result
}

// dues says how many partitions each member shall have, given how many it holds.
func dues(held []int, partitions int) []int {
	base, extra := partitions/len(held), partitions%len(held)
	due := make([]int, len(held))
	for i := range due {
		due[i] = base
		if held[i] > base && extra > 0 {
			due[i]++
			extra--
		}
	}
	for i := range due {
		if extra > 0 && due[i] == base {
			due[i]++
			extra--
		}
	}
	return due
}
