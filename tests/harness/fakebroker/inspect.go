package fakebroker

import "time"

// Stored is one message as a test sees it.
type Stored struct {
	ProducerID, ProducerSeq uint64
	Key, Value              []byte
}

// Stored returns the messages of a partition; the first has sequence 1.
func (b *Broker) Stored(topic, part uint16) []Stored {
	b.mu.Lock()
	defer b.mu.Unlock()
	var list []Stored
	for _, r := range b.topics[topic-1].partitions[part].log {
		list = append(list, Stored{r.producer, r.producerSeq, r.key, r.value})
	}
	return list
}

// Unacknowledged returns how many messages of a partition a group has not acknowledged.
func (b *Broker) Unacknowledged(groupName string, part uint16) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.groups[groupName]
	if g == nil {
		return 0
	}
	return len(b.topics[g.topic-1].partitions[part].log) - len(g.cursor[part].done)
}

// Pause makes the broker stand still for d.
func (b *Broker) Pause(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	time.Sleep(d)
}
