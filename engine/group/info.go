package group

// MemberInfo is a member as reports show it.
type MemberInfo struct {
	ID        uint64
	Connected bool
	// JoinEpoch is the membership epoch of its joining; in a broadcast group, the ownership epoch of all that it has.
	JoinEpoch uint32
	// InstalledEpoch is the assignment epoch that it has confirmed.
	InstalledEpoch uint32
}

// PartInfo is a partition as reports show it.
type PartInfo struct {
	Owner          uint64 // 0: nobody
	OwnershipEpoch uint64
	Installed      bool
}

// Epochs returns the committed membership and assignment epochs.
func (m *Machine) Epochs() (membership, assignment uint32) {
	return m.membershipEpoch, m.assignmentEpoch
}

// Members returns the members that are not about to go, in the order of their ids.
func (m *Machine) Members() []MemberInfo {
	all := make([]MemberInfo, 0, len(m.members))
	for _, mb := range m.members {
		if !mb.leaving {
			all = append(all, MemberInfo{ID: mb.id, Connected: mb.session != 0, JoinEpoch: mb.joinEpoch, InstalledEpoch: mb.installed})
		}
	}
	return all
}

// Parts returns the partitions in order. Those of a broadcast group have no owner: every member owns each of them.
func (m *Machine) Parts() []PartInfo {
	all := make([]PartInfo, m.partitions)
	for i, p := range m.parts {
		all[i] = PartInfo{Owner: p.owner, OwnershipEpoch: p.epoch, Installed: p.installed}
	}
	return all
}

// Settled reports whether every change is committed and every notice confirmed.
func (m *Machine) Settled() bool {
	return m.flight.left == 0 && len(m.waiting) == 0 && len(m.notices) == 0 && m.retryAt == 0
}
