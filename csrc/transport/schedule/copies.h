// The schedules of calls that only copy, for which all ranks have come.
#pragma once

#include "transport/schedule/program_writer.h"

namespace pg_sdma {

// On streams. Writes where the exchange can be written, else reads.
Program copies_on_streams(ProgramWriter& write);
// On the calling thread: all ranks are ready before any of them begins. Reads, `chunk` bytes of
// each rank's blocks at a time.
Program copies_on_thread(ProgramWriter& write, size_t chunk);

}  // namespace pg_sdma
