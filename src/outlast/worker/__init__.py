"""The processes of one worker: its agent, preparation, launch, hang detection and tracking."""
