package coord

// groupStarted implements deliverer.
func (d *delivery) groupStarted(group uint16) bool {
	g := d.groups[group]
	if g == nil {
		return true // not served at all, which is logged; its members learn nothing new from waiting
	}
	for ; g.recorded < len(g.readers); g.recorded++ {
		if !g.readers[g.recorded].cur.Recorded() {
			return false
		}
	}
	return true
}

// memberGone implements deliverer.
func (d *delivery) memberGone(uint16, uint64) {}
