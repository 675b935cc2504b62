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

const char* status_name(nixl_status_t status) {
    switch (status) {
    case NIXL_IN_PROG:
        return "in progress";
    case NIXL_SUCCESS:
        return "success";
    case NIXL_ERR_NOT_POSTED:
        return "not posted";
    case NIXL_ERR_INVALID_PARAM:
        return "invalid parameter";
    case NIXL_ERR_BACKEND:
        return "backend error";
    case NIXL_ERR_NOT_FOUND:
        return "not found";
    case NIXL_ERR_MISMATCH:
        return "mismatch";
    case NIXL_ERR_NOT_ALLOWED:
        return "not allowed";
    case NIXL_ERR_REPOST_ACTIVE:
        return "posted while active";
    case NIXL_ERR_NOT_SUPPORTED:
        return "not supported";
    case NIXL_ERR_REMOTE_DISCONNECT:
        return "remote disconnected";
    case NIXL_ERR_CANCELED:
        return "canceled";
    default:
        return "unknown";
    }
}

} // namespace kvbm_cxl
