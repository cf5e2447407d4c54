// The schedule of a call for which a rank was late, carried in order of arrival
// (agreement/late_protocol.h), so that no host waits for another.
#pragma once

#include <vector>

#include "transport/schedule/program_writer.h"

namespace pg_sdma {

// Programs to be run one after the other. Who comes first enqueues a wait for the others, and has
// nothing to copy. Who comes later writes to each rank before it, as always, and reads what that
// rank would have written, which lies in what it exposes.
std::vector<Program> copies_in_order_of_arrival(ProgramWriter& write);

}  // namespace pg_sdma
