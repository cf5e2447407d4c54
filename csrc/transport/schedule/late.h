// The schedule of a call for which a rank was late, carried in order of arrival
// (agreement/late_protocol.h), so that no host waits for another.
#pragma once

#include "transport/schedule/program_writer.h"

namespace pg_sdma {

// Two programs: the second speaks of what runs beside the steps of the first. Who comes first
// enqueues a wait for the others, and has nothing to copy. Who comes later writes to each rank
// before it, as always, and reads what that rank would have written, which lies in what it exposes.
struct LatePrograms {
  Program copies;
  Program end;
};
LatePrograms copies_in_order_of_arrival(ProgramWriter& write);

}  // namespace pg_sdma
