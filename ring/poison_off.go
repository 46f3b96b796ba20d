//go:build !poison

package ring

// poisonBuild is false: pools overwrite released slabs only where SetPoison asks for it.
const poisonBuild = false
