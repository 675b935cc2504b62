// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"
#include "support/log.h"

namespace kvbm_cxl {

Status Plan::make(std::string engine_id, std::vector<std::shared_ptr<Memory>> memories, std::span<const Range> ranges,
                  std::shared_ptr<const Plan>& plan) {
    auto made = std::make_shared<Plan>();
    made->ranges.reserve(ranges.size());
    for (size_t i = 0; i < ranges.size(); ++i) {
        const Range& range = ranges[i];
        if (range.memory >= memories.size() || !memories[range.memory] ||
            !memories[range.memory]->contains({range.local_address, range.len_bytes}))
            return {NIXL_ERR_INVALID_PARAM, text("CXL: descriptor ", i, ": ", range.len_bytes, " bytes at ", hex(range.local_address),
                                                 " do not lie in one registration")};
        if (range.remote_address + range.len_bytes < range.remote_address || made->len_bytes + range.len_bytes < made->len_bytes)
            return {NIXL_ERR_INVALID_PARAM, text("CXL: descriptor ", i, ": ", range.len_bytes, " bytes at ", hex(range.remote_address),
                                                 " of the peer end beyond all addresses")};
        if (range.len_bytes == 0)
            continue;
        made->len_bytes += range.len_bytes;
        made->ranges.push_back(range);
    }
    made->engine_id = std::move(engine_id);
    made->memories = std::move(memories);
    plan = std::move(made);
    return {};
}

} // namespace kvbm_cxl
