package engine

// What a node does about its own data when that turns out to be damaged.

// suspect puts on record that rounds may be missing that this node vouched for, before anything is written. It runs on the
// goroutine that opens the engine.
func (n *Node) suspect(reason error) error {
	n.log.Error("this node's data is damaged: it counts for nothing until it has everything again", "err", reason)
	if n.machine == nil || n.opts.Engine.Stepped {
		// The control loop waits for the engine.
		if n.machine != nil {
			n.machine.Damaged(n.now())
		}
		s := n.file.State()
		s.Suspect = true
		if n.opts.Engine.Stepped {
			return n.file.SaveWait(waiter{n.disk}, s) // an earlier save may be under way there
		}
		return n.withDevice(func(d Device) error {
			n.file.SetDisk(d)
			defer n.file.SetDisk(n.disk)
			return n.file.SaveWait(waiter{d}, s)
		})
	}
	saved := make(chan error, 1)
	n.do(func() {
		n.machine.Damaged(n.now())
		n.carryOut()
		n.file.Save(n.file.State(), func(err error) { saved <- err }) // behind what Damaged has saved
	})
	return <-saved
}

// damaged takes note of files of a log that turned out to be damaged. What is damaged of it isn't served any more.
func (n *Node) damaged(log int) {
	if n.repairs[log] || n.hurt[log] {
		return
	}
	n.hurt[log] = true
	if n.machine.Needed() {
		n.log.Error("files of this node are damaged, and another node is not there to take over: it goes on leading without them", "log", log)
	}
	n.giveWay()
}

// giveWay has this node count for nothing until logs with damaged files were caught up with them made anew. A leader that the
// cluster can't do without waits with that: what is damaged of it may be damaged on the others, too, or they may be gone.
func (n *Node) giveWay() {
	if n.machine.Needed() {
		return
	}
	for log := range int(n.machine.State().Logs) {
		if !n.hurt[log] {
			continue
		}
		delete(n.hurt, log)
		n.repairs[log] = true
		n.log.Error("files of this node are damaged: they are made again from the leader", "log", log)
		n.machine.Damaged(n.now())
		n.machine.GivesUp(log)
	}
}

// repair begins to make damaged files again once there is a leader to get them from.
func (n *Node) repair(e *Engine) {
	leader, _ := n.machine.Leader()
	if leader == 0 || leader == n.opts.Self {
		return
	}
	if e.beyondRepair() != nil {
		n.reopen(len(e.shards)) // which sets everything aside
		return
	}
	for log := range e.shards {
		if n.repairs[log] && n.catchings[log] == nil {
			n.wanted[log] = n.lastOf[log]
			n.machine.Behind(n.now(), log)
		}
	}
}
