//go:build !uring

package ring

import "errors"

var errNotBuilt = errors.New("this program was built without the uring tag (build with -tags=uring -ldflags=-checklinkname=0)")

func newUring(int, *Ring) (backend, error) { return nil, errNotBuilt }
