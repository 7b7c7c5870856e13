# Read by llama.cpp's untouched CMakeLists.txt right after its project() (CMAKE_PROJECT_INCLUDE): one target for all programs
# that are wanted. MOE_HOT_PROGRAMS: which.
function(moe_hot_add_programs)
    if(NOT TARGET moe-hot-programs)
        add_custom_target(moe-hot-programs DEPENDS ${MOE_HOT_PROGRAMS})
    endif()
endfunction()
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL moe_hot_add_programs)
