// SPDX-License-Identifier: Apache-2.0
#include "status.h"

namespace kvbm_cxl {

std::string hex(uint64_t value) {
    std::ostringstream out;
    out << "0x" << std::hex << value;
    return out.str();
}

Status cancelled() {
    return {NIXL_ERR_CANCELED, "CXL: cancelled"};
}

} // namespace kvbm_cxl
