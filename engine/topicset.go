package engine

// topicSet is a set of topic ids. It is small enough to be whole, and asked for every publish.
type topicSet [(1 << 16) / 64]uint64

func (s *topicSet) add(topic uint16)      { s[topic/64] |= 1 << (topic % 64) }
func (s *topicSet) has(topic uint16) bool { return s[topic/64]&(1<<(topic%64)) != 0 }
