// The cores that threads run on.
#pragma once

#include <vector>

namespace pg_sdma {

// The calling thread's, at this moment.
int this_core();

// How many the calling thread may run on.
int allowed_cores();

// Moves the calling thread to a core that it may run on and that is none of `taken`; its affinity
// stays what it is. Nothing where there is no such core.
void move_off(const std::vector<int>& taken);

}  // namespace pg_sdma
